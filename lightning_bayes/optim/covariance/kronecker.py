"""The covariance of a layer's matrix, stored in the state of its weight beside S and A.

    1/Σ = scale · (S ⊗ A, π-damped by damping)        scale = Ñ/τ_t, damping = γ_t, the prior's δ̃ included

An inversion stores the damping and the root of the damped inverse, which samples use; `refresh` stores the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.posteriors import kronecker_precision, noise_damping, noise_scale, tensor_size

_MIN_DAMPING = 1e-8  # γ_t of a matrix without any curvature: large enough for π-damping to make it flat


def layer_product(state: Mapping[str, Any], kind: str) -> KroneckerProduct:
    """The ``"factor"``, ``"inverse"`` or ``"root"`` of a layer, from the optimizer state of its weight."""
    return KroneckerProduct(state[f"output_{kind}"], state[f"input_{kind}"])


def layer_damping(curvature: KroneckerProduct, hyper: Effective) -> float:
    """γ_t of a layer's S ⊗ A; for the noise of the bound, δ̃ plus the noise's damping."""
    if hyper.relative_noise is None:
        return hyper.prior + hyper.noise_damping
    mean = curvature.trace().mean() / (curvature.left.shape[-1] * curvature.right.shape[-1])
    damping = noise_damping(mean, hyper.stated_damping, hyper.noise_flatness)
    return float(torch.where(mean > 0, damping, max(hyper.stated_damping, _MIN_DAMPING)))


def refresh(group: Mapping[str, Any], state: dict[str, Any], weight: Tensor) -> None:
    """Store the scale of a layer that has a root; `weight` is μ."""
    hyper = effective(group)
    state["scale"] = hyper.scale
    if hyper.relative_noise is not None:
        variance, size = _mean_variance(layer_product(state, "root")), tensor_size(weight, state["initial_rms"])
        state["scale"] = float(noise_scale(variance, size, hyper.relative_noise, hyper.scale))


def layer_precision(state: Mapping[str, Any]) -> KroneckerProduct:
    """1/Σ of a layer with stored noise."""
    return kronecker_precision(layer_product(state, "factor"), state["scale"], state["damping"])


def _mean_variance(root: KroneckerProduct) -> Tensor:
    """The mean of diag(R Rᵀ) for R = R_S ⊗ R_A, a scalar."""
    left, right = (factor.square().sum((-2, -1)) / factor.shape[-1] for factor in root)
    return (left * right).mean()
