"""Noisy K-FAC with correlations between neighbouring layers (NNG-BlkTri), Zhang et al. 2018, section 3.5.

It uses the approximation of Martens & Grosse 2015, section 4.3 (https://arxiv.org/abs/1503.05671): the blocks of the
curvature on and next to the diagonal are Kronecker products, and its inverse is block-tridiagonal; see
`linalg.block_tridiagonal`.

    W = M + √(τ/Ñ) F̂^{-½} E          F̂ from the old blocks, with diagonal blocks π-damped by δ̃ [+ γ]
    blocks ← β₂ blocks + (1-β₂) measured
    m ← β₁ m + (1-β₁)(ĝ + δ̃ M)
    M ← M - α F̂⁻¹ m̂                  F̂ from the new blocks, damped by δ̃ + γ

The functions below take the matrices of all layers of a chain of `torch.nn.Linear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct, pi_damped
from lightning_bayes.optim.diagonal.state import average, debiased
from lightning_bayes.optim.kronecker.equations import average_factors
from lightning_bayes.optim.kronecker.kl_clip import clipped_lr, fisher_norm


class ChainCurvature(NamedTuple):
    """Curvature of the mean negative log-likelihood, prior not included."""

    blocks: tuple[KroneckerProduct, ...]  # S_ii ⊗ A_ii of each layer
    links: tuple[KroneckerProduct, ...]  # S_i,i+1 ⊗ A_i,i+1 of each pair of neighbours


class ChainState(NamedTuple):
    """State of a chain of layers."""

    means: tuple[Tensor, ...]  # M of each layer, [out, K]
    momenta: tuple[Tensor, ...]
    curvature: ChainCurvature


def damped_inverse(curvature: ChainCurvature, damping: float, names: Sequence[str] = ()) -> BlockTridiagonalInverse:
    """Return F̂⁻¹, with damping only in the diagonal blocks so that F̂ is positive definite."""
    damped = [pi_damped(block, damping) for block in curvature.blocks]
    return BlockTridiagonalInverse.of(damped, curvature.links, names)


def average_curvature(old: ChainCurvature, measured: ChainCurvature, *, beta: float) -> ChainCurvature:
    """Return the running average of blocks and links; `beta` is the weight of the old ones."""
    blocks = [average_factors(*pair, beta=beta) for pair in zip(old.blocks, measured.blocks, strict=True)]
    links = [average_factors(*pair, beta=beta) for pair in zip(old.links, measured.links, strict=True)]
    return ChainCurvature(tuple(blocks), tuple(links))


def sample(
    means: Sequence[Tensor],  # M of each layer
    covariance: BlockTridiagonalInverse,  # F̂⁻¹ of the noise, from the curvature before this update's measurement
    noise: Sequence[Tensor],  # standard normal, one matrix per layer
    *,
    num_data: float,  # Ñ = ρN
    kl_weight: float = 1.0,  # τ
) -> list[Tensor]:
    """Draw a posterior sample W of each layer."""
    scale = math.sqrt(kl_weight / num_data)
    return [mean + scale * offset for mean, offset in zip(means, covariance.root(noise), strict=True)]


def update(
    state: ChainState,
    grads: Sequence[Tensor],  # ĝ of each layer at the sample
    measured: ChainCurvature,  # blocks and links at the sample
    *,
    lr: float,  # α_max
    betas: tuple[float, float],  # (β₁, β₂), weights of the old momentum and the old curvature
    prior: float,  # δ̃
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
    kl_clip: float | None = None,  # bound c of `optim.kronecker.kl_clip`; None for no bound
    invert: Callable[[ChainCurvature, float], BlockTridiagonalInverse] = damped_inverse,
) -> ChainState:
    """One update of the chain; pure. An `invert` that caches its last result can share it with the noise."""
    curvature = average_curvature(state.curvature, measured, beta=betas[1])
    momenta = tuple(
        average(momentum, grad + prior * mean, betas[0])
        for momentum, grad, mean in zip(state.momenta, grads, state.means, strict=True)
    )
    corrected = [debiased(momentum, betas[0], step) for momentum in momenta]
    directions = invert(curvature, prior + damping).matvec(corrected)
    rate: float | Tensor = lr
    if kl_clip is not None:
        rate = clipped_lr(lr, fisher_norm(directions, corrected), kl_clip)[..., None, None]
    means = tuple(mean - rate * direction for mean, direction in zip(state.means, directions, strict=True))
    return ChainState(means, momenta, curvature)
