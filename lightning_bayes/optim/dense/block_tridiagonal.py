"""Noisy K-FAC whose neighbouring layers are correlated (NNG-BlkTri), Zhang et al. 2018, section 3.5.

The approximation is that of Martens & Grosse 2015, section 4.3 (https://arxiv.org/abs/1503.05671): the curvature's blocks
on and next to the diagonal are Kronecker products, its inverse is block-tridiagonal; see `linalg.block_tridiagonal`.

    W = M + √(τ/Ñ) F̂^{-½} E          F̂ with π-damped diagonal blocks, δ̃ [+ γ], the old blocks
    blocks ← β₂ blocks + (1-β₂) measured
    m ← β₁ m + (1-β₁)(ĝ + δ̃ M)
    M ← M - α F̂⁻¹ m̂                  the new blocks, δ̃ + γ

The matrices of a step are those of all layers of a chain of `torch.nn.Linear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct, pi_damped
from lightning_bayes.optim.diagonal.state import average, debiased
from lightning_bayes.optim.kronecker.kfac import average_factors
from lightning_bayes.optim.kronecker.kl_clip import clipped_lr, fisher_norm


class ChainCurvature(NamedTuple):
    """Curvature of the mean negative log-likelihood, prior not included."""

    blocks: tuple[KroneckerProduct, ...]  # S_ii ⊗ A_ii of every layer
    links: tuple[KroneckerProduct, ...]  # S_i,i+1 ⊗ A_i,i+1 of every pair of neighbours


class ChainState(NamedTuple):
    """State of a chain of layers."""

    means: tuple[Tensor, ...]  # M of every layer, [out, K]
    momenta: tuple[Tensor, ...]
    curvature: ChainCurvature


def damped_inverse(curvature: ChainCurvature, damping: float, names: Sequence[str] = ()) -> BlockTridiagonalInverse:
    """F̂⁻¹ with the damping π-split into the diagonal blocks; links stay undamped, so F̂ stays positive definite."""
    damped = [pi_damped(block, damping) for block in curvature.blocks]
    return BlockTridiagonalInverse.of(damped, curvature.links, names)


def average_curvature(old: ChainCurvature, measured: ChainCurvature, *, beta: float) -> ChainCurvature:
    """Average new blocks and links in with the weight `beta` on the old."""
    blocks, links = (
        tuple(average_factors(before, now, beta=beta) for before, now in zip(befores, nows, strict=True))
        for befores, nows in zip(old, measured, strict=True)
    )
    return ChainCurvature(blocks, links)


def sample(
    means: Sequence[Tensor],
    covariance: BlockTridiagonalInverse,
    noise: Sequence[Tensor],
    *,
    num_data: float,
    kl_weight: float = 1.0,
) -> list[Tensor]:
    """Draw all matrices of the chain.

    Args:
        means: M of every layer.
        covariance: F̂⁻¹ of the noise, from the curvature before this update's measurement.
        noise: Standard normal, one matrix per layer.
        num_data: Ñ = ρN.
        kl_weight: τ.

    Returns:
        W of every layer.
    """
    scale = math.sqrt(kl_weight / num_data)
    return [mean + scale * away for mean, away in zip(means, covariance.root(noise), strict=True)]


def update(
    state: ChainState,
    grads: Sequence[Tensor],
    measured: ChainCurvature,
    *,
    lr: float,
    betas: tuple[float, float],
    prior: float,
    damping: float = 0.0,
    step: int = 1,
    kl_clip: float | None = None,
    invert: Callable[[ChainCurvature, float], BlockTridiagonalInverse] = damped_inverse,
) -> ChainState:
    """One update of the chain; pure.

    Args:
        state: State before the update.
        grads: ĝ of every layer at the sample.
        measured: Blocks and links at the sample.
        lr: α_max.
        betas: (β₁, β₂), weights of the old momentum and the old curvature.
        prior: δ̃.
        damping: γ.
        step: Number of this update, from 1.
        kl_clip: c of `optim.kronecker.kl_clip`, None for none.
        invert: Inverts the damped curvature; pass one that remembers its last result to share it with the noise.

    Returns:
        The new state.
    """
    curvature = average_curvature(state.curvature, measured, beta=betas[1])
    momenta = tuple(
        average(momentum, grad + prior * mean, betas[0])
        for momentum, grad, mean in zip(state.momenta, grads, state.means, strict=True)
    )
    corrected = [debiased(momentum, betas[0], step) for momentum in momenta]
    moves = invert(curvature, prior + damping).matvec(corrected)
    rate = lr if kl_clip is None else clipped_lr(lr, fisher_norm(moves, corrected), kl_clip)[..., None, None]
    means = tuple(mean - rate * move for mean, move in zip(state.means, moves, strict=True))
    return ChainState(means, momenta, curvature)
