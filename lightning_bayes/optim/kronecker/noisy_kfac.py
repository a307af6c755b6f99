"""Noisy K-FAC, Zhang et al. 2018, Algorithm 2, https://arxiv.org/abs/1712.02390, as pure functions of layers' states.

    W = M + √(τ/Ñ) R_S E R_Aᵀ        E standard normal, R_S R_Sᵀ = (S + √γ'/π I)⁻¹, R_A R_Aᵀ = (A + π√γ' I)⁻¹

so that Cov(vec W) = (τ/Ñ) (S + √γ'/π I)⁻¹ ⊗ (A + π√γ' I)⁻¹. The gradient is taken at W; the rest is K-FAC
(`optim.kronecker.kfac`), whose mean is M. Intrinsic damping δ̃ = τδ/Ñ is the prior and always part of the noise; extrinsic
damping γ is not, as in the paper (γ' = δ̃), or is (γ' = δ̃ + γ), as in Osawa et al. 2019. The roots R are cached with the
inverses, so a pass samples from factors that are at most T_inv updates old, and always from those before its own
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.kronecker import kfac


class NoisyKFACState(NamedTuple):
    """State of one layer."""

    layer: kfac.KFACState
    root: KroneckerProduct  # R_S ⊗ R_A, as of the last inversion


def initial_state(
    mean: Tensor,
    curvature: KroneckerProduct,
    *,
    prior: float,
    damping: float = 0.0,
    damping_in_noise: bool = False,
    name: str = "",
) -> NoisyKFACState:
    """The state at the first measurement.

    Args:
        mean: M.
        curvature: Ŝ ⊗ Â.
        prior: δ̃.
        damping: γ.
        damping_in_noise: Whether γ counts in the noise.
        name: What error messages call the layer.

    Returns:
        The state, with inverses and no momentum.
    """
    layer = kfac.initial_state(mean, curvature, prior=prior, damping=damping, name=name)
    return NoisyKFACState(
        layer, noise_root(curvature, prior=prior, damping=damping if damping_in_noise else 0.0, name=name)
    )


def noise_root(
    curvature: KroneckerProduct, *, prior: float, damping: float | Tensor = 0.0, name: str = ""
) -> KroneckerProduct:
    """R_S ⊗ R_A; `damping` is γ where it is part of the noise, other arguments as in `initial_state`."""
    return pi_damped(curvature, prior + damping).inverse_root(f"layer {name!r}" if name else "a layer")


def refresh(
    state: NoisyKFACState, *, prior: float, damping: float = 0.0, damping_in_noise: bool = False, name: str = ""
) -> NoisyKFACState:
    """Invert the current factors; arguments as in `initial_state`."""
    fresh = initial_state(
        state.layer.mean,
        state.layer.curvature,
        prior=prior,
        damping=damping,
        damping_in_noise=damping_in_noise,
        name=name,
    )
    return NoisyKFACState(state.layer._replace(inverse=fresh.layer.inverse), fresh.root)


def average_factors(
    state: NoisyKFACState, *, beta: float, output_factor: Tensor | None = None, input_factor: Tensor | None = None
) -> NoisyKFACState:
    """Average new factors in, as `kfac.average_factors`; inverses and roots stay until `refresh`."""
    curvature = kfac.average_factors(
        state.layer.curvature, beta=beta, output_factor=output_factor, input_factor=input_factor
    )
    return state._replace(layer=state.layer._replace(curvature=curvature))


def sample(state: NoisyKFACState, noise: Tensor, *, num_data: float, kl_weight: float = 1.0) -> Tensor:
    """Draw a layer's matrix.

    Args:
        state: State before this update's measurement.
        noise: E, standard normal, ``[..., out, K]``.
        num_data: Ñ = ρN.
        kl_weight: τ.

    Returns:
        W, ``[..., out, K]``.
    """
    return draw(state.layer.mean, state.root, noise, num_data=num_data, kl_weight=kl_weight)


def draw(mean: Tensor, root: KroneckerProduct, noise: Tensor, *, num_data: float, kl_weight: float = 1.0) -> Tensor:
    """As `sample`, from M and R_S ⊗ R_A alone."""
    return mean + math.sqrt(kl_weight / num_data) * root.upper_matvec(noise)


def update(
    states: Sequence[NoisyKFACState],
    grads: Sequence[Tensor],
    *,
    lr: float,
    beta: float = 0.0,
    prior: float,
    step: int = 1,
    kl_clip: float | None = None,
    samples: Sequence[Tensor] | None = None,
) -> list[NoisyKFACState]:
    """One update of all layers; pure.

    Args:
        states: State of each layer, factors and inverses already refreshed where due.
        grads: ĝ of each layer at its sample.
        lr: α_max.
        beta: β₁.
        prior: δ̃.
        step: Number of this update, from 1.
        kl_clip: c of `optim.kronecker.kl_clip`, None for none.
        samples: W of each layer, to take the prior's gradient there as in the paper; None takes it at M, which has the
            same expectation and less variance.

    Returns:
        New states.
    """
    layers = [state.layer for state in states]
    moved = kfac.update(layers, grads, lr=lr, beta=beta, prior=prior, step=step, kl_clip=kl_clip, decayed=samples)
    return [state._replace(layer=layer) for state, layer in zip(states, moved, strict=True)]
