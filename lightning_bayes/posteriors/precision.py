"""Posterior precision from running curvature: the one place where N, δ and τ enter.

    1/Σ = (Ñ/τ) (s + δ̃ + γ) = (Ñ/τ) (s + γ) + δ        Ñ = ρN,  δ̃ = τδ/Ñ

This is exact for every KL weight τ: the fixed point of the tempered bound E_q[Ñ f̄] + τ KL(q ‖ p) has this precision. The
printed update of Osawa et al. 2019 (Algorithm 1) is not exact for τ ∉ {0, 1}; their released code uses this form.
"""

from __future__ import annotations

from torch import Tensor

from lightning_bayes.errors import HyperparameterError

_ROUNDING = 1e-11  # relative tolerance; a number with twelve digits is within it


def precision(
    curvature: Tensor,
    *,
    num_data: float,
    prior_precision: float,
    kl_weight: float = 1.0,
    damping: float = 0.0,
) -> Tensor:
    """1/Σ = (Ñ/τ) (s + γ) + δ of each weight, shaped like `curvature`."""
    scale = num_data / kl_weight  # Ñ/τ
    return curvature.mul(scale).add_(damping * scale + prior_precision)


def minimal_precision(num_data: float, prior_precision: float, kl_weight: float = 1.0, damping: float = 0.0) -> float:
    """The posterior precision without curvature, of prior and damping alone."""
    return prior_precision + damping * num_data / kl_weight


def initial_curvature(
    init_precision: float, *, num_data: float, prior_precision: float, kl_weight: float = 1.0, damping: float = 0.0
) -> float:
    """s₀ = τ (P₀ - δ)/Ñ - γ, whose posterior has the precision P₀; 0 if that is rounding error."""
    minimum = minimal_precision(num_data, prior_precision, kl_weight, damping)
    if abs(init_precision - minimum) <= _ROUNDING * minimum:
        return 0.0
    if init_precision < minimum:
        raise HyperparameterError(
            f"init_precision={init_precision:.12g} is below {minimum:.12g}, the precision of prior_precision="
            f"{prior_precision:g} and damping={damping:g} alone. Use at least that value."
        )
    return (init_precision - minimum) * kl_weight / num_data
