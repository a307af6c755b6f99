"""Noisy natural gradients with a full covariance for small models, as pure functions of the flattened weights.

    θ = μ + √(τ/Ñ) L⁻ᵀ ε           L Lᵀ = S + δ̃ I [+ γ I], with the old S
    S ← β₂ S + (1-β₂) Ĥ
    m ← β₁ m + (1-β₁)(ĝ + δ̃ μ)     m̂ = m / (1-β₁ᵗ)
    μ ← μ - α (S + (δ̃+γ) I)⁻¹ m̂    with the new S

The choice of Ĥ determines the algorithm:

- the Hessian of the mean negative log-likelihood: VON (Khan et al. 2018, eqs. 7-9, https://arxiv.org/abs/1806.04854); with
  α = 1-β₂ and β₁ = 0 it is conjugate-computation variational inference (CVI, Khan & Lin 2017);
- the mean of g_i g_iᵀ with the data's labels, the empirical Fisher: VONG (Khan et al. 2017);
- the mean of g_i g_iᵀ with labels sampled from the model, the Fisher: NNG-full (Zhang et al. 2018, eqs. 9-10).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.linalg import cholesky, inverse_root
from lightning_bayes.optim.diagonal.state import average, debiased

_NAME = "curvature with prior and damping"


class FullState(NamedTuple):
    """State of all weights as one vector; leading dimensions are independent models."""

    mean: Tensor  # μ, [..., D]
    curvature: Tensor  # S, [..., D, D], of the mean negative log-likelihood, prior not included
    momentum: Tensor  # m, [..., D]


def sample(
    state: FullState,  # before this update's measurement
    noise: Tensor,  # ε, standard normal, [..., D]
    *,
    num_data: float,  # Ñ = ρN
    prior: float,  # δ̃ = τδ/Ñ
    kl_weight: float = 1.0,  # τ
    damping: float = 0.0,  # γ if it is part of the noise, else 0
) -> Tensor:
    """Draw a posterior sample of the weights, ``[..., D]``."""
    root = inverse_root(damped(state.curvature, prior + damping), _NAME)
    return state.mean + math.sqrt(kl_weight / num_data) * (root @ noise[..., None])[..., 0]


def outer_products(grads: Tensor) -> Tensor:
    """Return the mean of g_i g_iᵀ, ``[..., D, D]``, of per-example gradients ``[..., examples, D]``."""
    return grads.mT @ grads / grads.shape[-2]


def update(
    state: FullState,
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood at the sample, [..., D]
    curvature: Tensor,  # Ĥ at the sample, [..., D, D]
    *,
    lr: float,  # α
    betas: tuple[float, float],  # (β₁, β₂), weights of the old momentum and the old curvature
    prior: float,  # δ̃
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
) -> FullState:
    """One update; pure."""
    new_curvature = average(state.curvature, curvature, betas[1])
    momentum = average(state.momentum, grad + prior * state.mean, betas[0])
    factor = cholesky(damped(new_curvature, prior + damping), _NAME)
    direction = torch.cholesky_solve(debiased(momentum, betas[0], step)[..., None], factor)[..., 0]
    return FullState(state.mean - lr * direction, new_curvature, momentum)


def damped(matrix: Tensor, amount: float) -> Tensor:
    """Add `amount` to the diagonal of ``[..., D, D]`` matrices."""
    return matrix + amount * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
