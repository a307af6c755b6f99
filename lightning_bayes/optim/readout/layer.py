"""The covariance of a layer's matrix, from the parameter group and the optimizer state of its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.readout.noise_terms import is_noisy
from lightning_bayes.posteriors import NoiseShape, kronecker_precision, noise_damping, noise_scale, tensor_size

_MIN_DAMPING = 1e-8  # γ_t of a matrix without any curvature: large enough for π-damping to make it flat


def layer_product(state: Mapping[str, Any], kind: str) -> KroneckerProduct:
    """The ``"factor"``, ``"inverse"`` or ``"root"`` of a layer, from the optimizer state of its weight."""
    return KroneckerProduct(state[f"output_{kind}"], state[f"input_{kind}"])


def layer_precision(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> KroneckerProduct | None:
    """L ⊗ R of a layer from its current factors; None without noise. Arguments as in `layer_shape`."""
    if not is_noisy(group, state):
        return None
    scale, damping = layer_shape(group, state, weight)
    return kronecker_precision(layer_product(state, "factor"), scale, damping)


def layer_shape(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> NoiseShape:
    """The shape of the noise of a layer's matrix, computed from its current factors rather than their last inversion.

    The precision is Ñ/τ_t times the π-damped S ⊗ A. The mean variance is the mean diagonal of its inverse.

    Args:
        group: Parameter group of the layer's weight.
        state: Optimizer state of the layer's weight.
        weight: μ of the layer's weight.

    Returns:
        Ñ/τ_t and γ_t, scalars.
    """
    hyperparameters = effective(group)
    curvature = layer_product(state, "factor")
    damping = layer_damping(curvature, hyperparameters)
    scale: Tensor | float = hyperparameters.scale
    if hyperparameters.relative_noise is not None:
        root = pi_damped(curvature, damping).inverse_root("a layer")
        scale = layer_scale(mean_variance(root), state, weight, hyperparameters)
    return NoiseShape(
        *(torch.as_tensor(number, dtype=weight.dtype, device=weight.device) for number in (scale, damping))
    )


def layer_damping(curvature: KroneckerProduct, hyperparameters: Effective) -> Tensor | float:
    """γ_t of a layer's S ⊗ A, prior included, for `pi_damped`; for the noise of the bound, δ̃ plus the noise's damping."""
    if hyperparameters.relative_noise is None:
        return hyperparameters.prior + hyperparameters.noise_damping
    mean = curvature.trace().mean() / (curvature.left.shape[-1] * curvature.right.shape[-1])
    damping = noise_damping(mean, hyperparameters.stated_damping, hyperparameters.noise_flatness)
    return torch.where(mean > 0, damping, max(hyperparameters.stated_damping, _MIN_DAMPING))


def mean_variance(root: KroneckerProduct) -> Tensor:
    """The mean of diag(R Rᵀ) for R = R_S ⊗ R_A, a scalar."""
    left, right = (factor.square().sum((-2, -1)) / factor.shape[-1] for factor in root)
    return (left * right).mean()


def layer_scale(
    variance: Tensor, state: Mapping[str, Any], weight: Tensor, hyperparameters: Effective
) -> Tensor | float:
    """Ñ/τ_t of a layer's matrix; Ñ/τ for the noise of the bound.

    Args:
        variance: `mean_variance` of the root of the inverse of the damped S ⊗ A.
        state: Optimizer state of the layer's weight.
        weight: μ of the layer's weight.
        hyperparameters: Effective hyperparameters of the weight's group.

    Returns:
        A scalar.
    """
    if hyperparameters.relative_noise is None:
        return hyperparameters.scale
    size = state["size"] if "size" in state else tensor_size(weight, state["initial_rms"])
    return noise_scale(variance, size, hyperparameters.relative_noise, hyperparameters.scale)


def store_size(state: dict[str, Any], mean: Tensor) -> None:
    """Store r_t in the state of a layer's weight; `mean` is μ."""
    state["size"] = tensor_size(mean, state["initial_rms"])
