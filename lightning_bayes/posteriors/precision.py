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
    """Posterior precision of each weight.

    Args:
        curvature: s, curvature of the mean negative log-likelihood, any shape.
        num_data: Ñ = ρN, the number of examples times the data-augmentation factor.
        prior_precision: δ of the prior N(0, 1/δ).
        kl_weight: τ.
        damping: γ, added to the curvature.

    Returns:
        1/Σ, shaped like `curvature`.

    Example:
        >>> import torch
        >>> precision(torch.tensor([0.5]), num_data=100, prior_precision=2.0)
        tensor([52.])
    """
    scale = num_data / kl_weight  # Ñ/τ
    return curvature.mul(scale).add_(damping * scale + prior_precision)


def minimal_precision(num_data: float, prior_precision: float, kl_weight: float = 1.0, damping: float = 0.0) -> float:
    """The posterior precision without curvature, of prior and damping alone."""
    return prior_precision + damping * num_data / kl_weight


def initial_curvature(
    init_precision: float, *, num_data: float, prior_precision: float, kl_weight: float = 1.0, damping: float = 0.0
) -> float:
    """The curvature s₀ whose posterior has the precision `init_precision`.

    Args:
        init_precision: P₀, the desired posterior precision.
        num_data: Ñ.
        prior_precision: δ.
        kl_weight: τ.
        damping: γ, if it is part of the noise; 0 otherwise.

    Returns:
        s₀ = τ (P₀ - δ)/Ñ - γ; 0 if the result is rounding error.

    Raises:
        HyperparameterError: If s₀ would be negative because prior and damping alone exceed P₀.

    Example:
        >>> initial_curvature(52.0, num_data=100, prior_precision=2.0)
        0.5
    """
    minimum = minimal_precision(num_data, prior_precision, kl_weight, damping)
    if abs(init_precision - minimum) <= _ROUNDING * minimum:
        return 0.0
    if init_precision < minimum:
        raise HyperparameterError(
            f"init_precision={init_precision:.12g} is below {minimum:.12g}, the precision of prior_precision="
            f"{prior_precision:g} and damping={damping:g} alone. Use at least that value."
        )
    return (init_precision - minimum) * kl_weight / num_data
