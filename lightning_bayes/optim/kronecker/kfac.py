"""K-FAC, Martens & Grosse 2015, https://arxiv.org/abs/1503.05671, as pure functions of layers' states.

With W a layer's matrix (bias as last column), ĝ its mean gradient, S ⊗ A its curvature and δ̃ = τδ/Ñ the prior per example:

    every T_stats    A ← β₂ A + (1-β₂) Â        S ← β₂ S + (1-β₂) Ŝ        each on its own
    every T_inv      S⁻ = (S + √(δ̃+γ)/π I)⁻¹    A⁻ = (A + π√(δ̃+γ) I)⁻¹     π-split of intrinsic and extrinsic damping
    every step       m ← β₁ m + (1-β₁)(ĝ + δ̃ W)
                     v = S⁻ m̂ A⁻                 m̂ = m / (1-β₁ᵗ)
                     W ← W - α v                 α = min(lr, √(c / Σ_layers vᵀ m̂)), see `optim.kronecker.kl_clip`

Averages start from the first measurement, not from zero or the identity, and so need no correction. Matrices may have
leading dimensions: the groups of a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.diagonal.state import average, debiased
from lightning_bayes.optim.kronecker.kl_clip import clipped_lr, fisher_norm


class KFACState(NamedTuple):
    """State of one layer."""

    mean: Tensor  # W, [..., out, K]
    momentum: Tensor  # m, [..., out, K]
    curvature: KroneckerProduct  # S [..., out, out] ⊗ A [..., K, K], of the mean negative log-likelihood, no prior
    inverse: KroneckerProduct  # S⁻ ⊗ A⁻, as of the last inversion


def initial_state(
    mean: Tensor, curvature: KroneckerProduct, *, prior: float, damping: float = 0.0, name: str = ""
) -> KFACState:
    """The state at the first measurement.

    Args:
        mean: W.
        curvature: Ŝ ⊗ Â.
        prior: δ̃.
        damping: γ.
        name: What error messages call the layer.

    Returns:
        The state, with inverses and no momentum.
    """
    inverse = damped_inverse(curvature, prior=prior, damping=damping, name=name)
    return KFACState(mean, mean.new_zeros(mean.shape), curvature, inverse)


def average_factors(
    curvature: KroneckerProduct, *, beta: float, output_factor: Tensor | None = None, input_factor: Tensor | None = None
) -> KroneckerProduct:
    """Average new factors in; None leaves a factor as it is.

    Args:
        curvature: S ⊗ A.
        beta: β₂, weight of the old factors.
        output_factor: Ŝ.
        input_factor: Â.

    Returns:
        The new S ⊗ A.
    """
    left = curvature.left if output_factor is None else average(curvature.left, output_factor, beta)
    right = curvature.right if input_factor is None else average(curvature.right, input_factor, beta)
    return KroneckerProduct(left, right)


def damped_inverse(
    curvature: KroneckerProduct, *, prior: float, damping: float = 0.0, name: str = ""
) -> KroneckerProduct:
    """(S + √(δ̃+γ)/π I)⁻¹ ⊗ (A + π√(δ̃+γ) I)⁻¹; arguments as in `initial_state`."""
    return pi_damped(curvature, prior + damping).inverse(_label(name))


def direction(
    state: KFACState, grad: Tensor, *, beta: float, prior: float, step: int, decayed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Momentum, debiased momentum and preconditioned step of one layer.

    Args:
        state: State with the inverse to use.
        grad: ĝ, mean gradient of the negative log-likelihood, ``[..., out, K]``.
        beta: β₁.
        prior: δ̃.
        step: Number of this update, from 1.
        decayed: Where the prior's gradient is taken, W by default. Zhang et al. take it at the sample.

    Returns:
        m, m̂ and v = S⁻ m̂ A⁻.
    """
    gradient = grad + prior * (state.mean if decayed is None else decayed)
    momentum = average(state.momentum, gradient, beta)
    corrected = debiased(momentum, beta, step)
    return momentum, corrected, state.inverse.matvec(corrected)


def update(
    states: Sequence[KFACState],
    grads: Sequence[Tensor],
    *,
    lr: float,
    beta: float = 0.0,
    prior: float = 0.0,
    step: int = 1,
    kl_clip: float | None = None,
    decayed: Sequence[Tensor] | None = None,
) -> list[KFACState]:
    """One K-FAC update of all layers; pure. Factors and inverses stay as they are.

    Args:
        states: State of each layer, with the inverses to use.
        grads: ĝ of each layer.
        lr: α_max.
        beta: β₁.
        prior: δ̃.
        step: Number of this update, from 1.
        kl_clip: c, bound of the squared Fisher norm of the whole step; None for none. Then layers are summed, groups
            included, so states must have no other leading dimensions.
        decayed: Where the prior's gradient is taken, the means by default.

    Returns:
        New states.
    """
    at = [None] * len(states) if decayed is None else decayed
    moves = [
        direction(state, grad, beta=beta, prior=prior, step=step, decayed=place)
        for state, grad, place in zip(states, grads, at, strict=True)
    ]
    rate: float | Tensor = lr
    if kl_clip is not None:
        norm = fisher_norm([v.flatten() for _, _, v in moves], [m.flatten() for _, m, _ in moves], dims=1)
        rate = clipped_lr(lr, norm, kl_clip)
    return [
        state._replace(mean=state.mean - rate * v, momentum=momentum)
        for state, (momentum, _, v) in zip(states, moves, strict=True)
    ]


def _label(name: str) -> str:
    return f"layer {name!r}" if name else "a layer"
