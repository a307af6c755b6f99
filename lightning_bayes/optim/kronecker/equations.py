"""K-FAC and Noisy K-FAC as pure functions of one layer.

K-FAC, Martens & Grosse 2015, https://arxiv.org/abs/1503.05671. For a layer with matrix W (the bias is its last column), mean
gradient ĝ, curvature S ⊗ A and prior precision per example δ̃ = τδ/Ñ:

    every T_stats    S ← β₂ S + (1-β₂) Ŝ        A ← β₂ A + (1-β₂) Â        averaged separately
    every T_inv      S⁻ = (S + √(δ̃+γ)/π I)⁻¹    A⁻ = (A + π√(δ̃+γ) I)⁻¹     π-split of intrinsic and extrinsic damping
    every step       m ← β₁ m + (1-β₁)(ĝ + δ̃ W)
                     v = S⁻ m̂ A⁻                 m̂ = m / (1-β₁ᵗ)
                     W ← W - α v                 α = min(lr, √(c / Σ_layers vᵀ m̂)), see `optim.kronecker.moves`

The averages start from the first measurement instead of zero or the identity, so they need no bias correction. Matrices may
have leading dimensions for the groups of a convolution.

Noisy K-FAC, Zhang et al. 2018, Algorithm 2, https://arxiv.org/abs/1712.02390, computes the gradient at a sample:

    W = M + √(τ/Ñ) R_S E R_Aᵀ        E standard normal, R_S R_Sᵀ = (S + √γ'/π I)⁻¹, R_A R_Aᵀ = (A + π√γ' I)⁻¹

so that Cov(vec W) = (τ/Ñ) (S + √γ'/π I)⁻¹ ⊗ (A + π√γ' I)⁻¹. Everything else is K-FAC for the mean M. The noise always
includes the intrinsic damping δ̃, the prior. The extrinsic damping γ is excluded in the paper (γ' = δ̃) and included in Osawa
et al. 2019 (γ' = δ̃ + γ). The roots R are cached with the inverses, so a pass samples from factors that are at most T_inv
updates old and never include its own measurement.

The gradient of the prior is δ̃ M by default. The paper uses δ̃ W (``prior_at="sample"``), which has the same expectation and
more variance.

With ``relative_noise`` κ, the noise has the shape of the curvature and a size of κ r_l; `posteriors.shaped_noise` defines p:

    γ' = ε mean(diag S ⊗ A) + p        Ñ/τ_l = Ñ/τ + mean(diag (R_S R_Sᵀ ⊗ R_A R_Aᵀ)) / (κ r_l)²

so that W = M + R_S E R_Aᵀ / √(Ñ/τ_l) has the mean variance κ² r_l², unless the data require less.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.diagonal.state import average, debiased


class KFACState(NamedTuple):
    """The state of a layer that its step needs."""

    mean: Tensor  # W, [..., out, K], relative to the prior's mean
    momentum: Tensor  # m, [..., out, K]
    inverse: KroneckerProduct  # S⁻ [..., out, out] ⊗ A⁻ [..., K, K], as of the last inversion


class LayerStep(NamedTuple):
    """The update of a layer up to its length α, which all layers share."""

    momentum: Tensor  # m
    corrected: Tensor  # m̂; vᵀ F v = vᵀ m̂
    direction: Tensor  # v


def average_factors(curvature: KroneckerProduct, measured: KroneckerProduct, *, beta: float) -> KroneckerProduct:
    """The running averages of S and A with a measurement Ŝ ⊗ Â, where β₂ weights the old."""
    return KroneckerProduct(*(average(old, new, beta) for old, new in zip(curvature, measured, strict=True)))


def damped_inverse(curvature: KroneckerProduct, damping: float, name: str = "") -> KroneckerProduct:
    """S⁻ ⊗ A⁻, where `damping` is δ̃ + γ; `name` is the layer's, for error messages."""
    return pi_damped(curvature, damping).inverse(f"layer {name!r}" if name else "a layer")


def noise_root(curvature: KroneckerProduct, damping: float, name: str = "") -> KroneckerProduct:
    """R_S ⊗ R_A, where `damping` is γ'; `name` is the layer's, for error messages."""
    return pi_damped(curvature, damping).inverse_root(f"layer {name!r}" if name else "a layer")


def update(state: KFACState, grad: Tensor, *, beta: float = 0.0, prior: float = 0.0, step: int = 1) -> LayerStep:
    """One K-FAC update of one layer, m, m̂ and v = S⁻ m̂ A⁻, up to its length; pure."""
    momentum = average(state.momentum, grad + prior * state.mean, beta)
    corrected = debiased(momentum, beta, step)
    return LayerStep(momentum, corrected, state.inverse.matvec(corrected))
