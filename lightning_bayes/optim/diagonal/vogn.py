"""Variational online Gauss-Newton (VOGN), Khan et al. 2018, eqs. 10-11, https://arxiv.org/abs/1806.04854.

In this package's parametrisation, with ĝ = mean_i g_i and ĥ = mean_i g_i² at θ ~ N(μ, (τ/Ñ) / (s + δ̃)), δ̃ = τδ/Ñ:

    s ← β₂ s + (1-β₂) ĥ
    m ← β₁ m + (1-β₁)(ĝ + δ̃ μ)                     momentum of Osawa et al. 2019; β₁ = 0 is Khan's VOGN
    μ ← μ - α m̂ / (s + δ̃ + γ)                      m̂ = m / (1-β₁ᵗ); the new s, no square root

Khan et al. write β for 1-β₂ and λ̃ for δ̃; β₂ here weights the old value, as in Adam. ĥ is the diagonal of the
**empirical Fisher**, not of a generalised Gauss-Newton matrix, so the posterior precision is not exact even for linear
regression: its fixed point is δ + Σ_i E_q[g_i²].
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.state import MeanFieldState, average, with_prior
from lightning_bayes.optim.variational import VariationalOptimizer


def update(
    state: MeanFieldState,
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood at the sample
    sq_grad: Tensor,  # ĥ, mean squared per-example gradient at the sample
    *,
    lr: float,  # α
    betas: tuple[float, float],  # (β₁, β₂), weights of the old momentum and the old curvature
    prior: float | Tensor,  # δ̃ = τδ/Ñ
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
) -> MeanFieldState:
    """One VOGN update of one parameter; pure."""
    curvature = average(state.curvature, sq_grad, betas[1])
    momentum = average(state.momentum, with_prior(grad, state.mean, prior), betas[0])
    mean = torch.addcdiv(state.mean, momentum, curvature + (prior + damping), value=-lr / (1 - betas[0] ** step))
    return MeanFieldState(mean, curvature, momentum)


@final
class VOGN(VariationalOptimizer):
    """VOGN as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer`.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = VOGN(model, lr=0.1, num_data=4)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> sorted(opt.posterior().mean)
        ['bias', 'weight']
    """

    noisy = True
    family_type = DiagonalFamily
    averages_curvature = amortises = True
    natural_update = staticmethod(update)
