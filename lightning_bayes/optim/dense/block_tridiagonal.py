"""Noisy K-FAC whose neighbouring layers are correlated (NNG-BlkTri), Zhang et al. 2018, section 3.5.

The approximation is that of Martens & Grosse 2015, section 4.3 (https://arxiv.org/abs/1503.05671): the curvature's blocks
on and next to the diagonal are Kronecker products, its inverse is block-tridiagonal; see `linalg.block_tridiagonal`.

    W = M + √(τ/Ñ) F̂^{-½} E          F̂ with π-damped diagonal blocks, δ̃ [+ γ]
    every T_stats    blocks ← β₂ blocks + (1-β₂) measured
    every T_inv      F̂⁻¹ with δ̃ + γ, and the noise's with δ̃ [+ γ]
    every step       m ← β₁ m + (1-β₁)(ĝ + δ̃ M)        M ← M - α F̂⁻¹ m̂

The matrices of a step are those of all layers of a chain of `torch.nn.Linear`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_bayes.linalg import BlockTridiagonalInverse, KroneckerProduct, pi_damped
from lightning_bayes.optim.diagonal.state import average, debiased
from lightning_bayes.optim.kronecker.kfac import average_factors as average_block
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
    inverse: BlockTridiagonalInverse  # F̂⁻¹ of the step, as of the last inversion
    covariance: BlockTridiagonalInverse  # of the noise, without τ/Ñ


def initial_state(
    means: Sequence[Tensor],
    curvature: ChainCurvature,
    *,
    prior: float,
    damping: float = 0.0,
    damping_in_noise: bool = False,
    names: Sequence[str] = (),
) -> ChainState:
    """The state at the first measurement.

    Args:
        means: M of every layer.
        curvature: The first measurement.
        prior: δ̃.
        damping: γ.
        damping_in_noise: Whether γ counts in the noise.
        names: What error messages call the layers.

    Returns:
        The state, with inverses and no momentum.
    """
    inverse = damped_inverse(curvature, prior + damping, names)
    noise = inverse if damping_in_noise or not damping else damped_inverse(curvature, prior, names)
    return ChainState(tuple(means), tuple(mean.new_zeros(mean.shape) for mean in means), curvature, inverse, noise)


def damped_inverse(curvature: ChainCurvature, damping: float, names: Sequence[str] = ()) -> BlockTridiagonalInverse:
    """F̂⁻¹ with the damping π-split into the diagonal blocks; links stay undamped, so F̂ stays positive definite."""
    damped = [pi_damped(block, damping) for block in curvature.blocks]
    return BlockTridiagonalInverse.of(damped, curvature.links, names)


def refresh(
    state: ChainState,
    *,
    prior: float,
    damping: float = 0.0,
    damping_in_noise: bool = False,
    names: Sequence[str] = (),
) -> ChainState:
    """Invert the current blocks; arguments as in `initial_state`."""
    fresh = initial_state(
        state.means, state.curvature, prior=prior, damping=damping, damping_in_noise=damping_in_noise, names=names
    )
    return state._replace(inverse=fresh.inverse, covariance=fresh.covariance)


def average_curvature(state: ChainState, measured: ChainCurvature, *, beta: float) -> ChainState:
    """Average new blocks and links in with the weight `beta` on the old; inverses stay until `refresh`."""
    blocks, links = (
        tuple(average_block(old, new, beta=beta) for old, new in zip(olds, news, strict=True))
        for olds, news in zip(state.curvature, measured, strict=True)
    )
    return state._replace(curvature=ChainCurvature(blocks, links))


def sample(state: ChainState, noise: Sequence[Tensor], *, num_data: float, kl_weight: float = 1.0) -> list[Tensor]:
    """Draw all matrices of the chain.

    Args:
        state: State before this update's measurement.
        noise: Standard normal, one matrix per layer.
        num_data: Ñ = ρN.
        kl_weight: τ.

    Returns:
        W of every layer.
    """
    scale = math.sqrt(kl_weight / num_data)
    return [mean + scale * away for mean, away in zip(state.means, state.covariance.root(noise), strict=True)]


def update(
    state: ChainState,
    grads: Sequence[Tensor],
    *,
    lr: float,
    beta: float = 0.0,
    prior: float,
    step: int = 1,
    kl_clip: float | None = None,
) -> ChainState:
    """One update of the chain; pure.

    Args:
        state: State, curvature and inverses already refreshed where due.
        grads: ĝ of every layer at the sample.
        lr: α_max.
        beta: β₁.
        prior: δ̃.
        step: Number of this update, from 1.
        kl_clip: c of `optim.kronecker.kl_clip`, None for none.

    Returns:
        The new state.
    """
    momenta = tuple(
        average(momentum, grad + prior * mean, beta)
        for momentum, grad, mean in zip(state.momenta, grads, state.means, strict=True)
    )
    corrected = [debiased(momentum, beta, step) for momentum in momenta]
    moves = state.inverse.matvec(corrected)
    rate = lr if kl_clip is None else clipped_lr(lr, fisher_norm(moves, corrected), kl_clip)[..., None, None]
    means = tuple(mean - rate * move for mean, move in zip(state.means, moves, strict=True))
    return state._replace(means=means, momenta=momenta)
