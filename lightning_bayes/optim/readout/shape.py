"""The shape of a parameter's noise, from its parameter group and optimizer state; see `posteriors.shaped_noise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.weight_prior import noise_terms, prior_of, without_prior
from lightning_bayes.posteriors import NoiseShape, noise_damping, noise_moments, noise_scale, tensor_sizes

_MIN_DAMPING = 1e-8  # γ_t of a matrix without any curvature: large enough for π-damping to make it flat


def shape_of(
    group: Mapping[str, Any], states: Sequence[Mapping[str, Any]], means: Sequence[Tensor]
) -> NoiseShape | None:
    """The shape of the noise of parameters with a diagonal posterior, of one device and dtype.

    Args:
        group: Their parameter group.
        states: Their optimizer states.
        means: μ of each.

    Returns:
        Ñ/τ_t and γ_t of each parameter, γ_t without the δ̃ of per-weight priors; None for the noise of the bound.
    """
    hyperparameters = effective(group)
    if hyperparameters.relative_noise is None:
        return None
    inverse_means, dampings = torch.stack([_moments_of(group, state) for state in states]).unbind(1)
    sizes = torch.stack([_size_of(*pair) for pair in zip(states, means, strict=True)])
    scale = noise_scale(inverse_means, sizes, hyperparameters.relative_noise, hyperparameters.scale)
    return NoiseShape(scale, dampings)


def store_shape(group: Mapping[str, Any], state: dict[str, Any], mean: Tensor) -> None:
    """Store r_t, mean_j [1 / (s_j + γ_t)] and γ_t in the state of a parameter with a diagonal posterior.

    Together with κ and Ñ/τ they determine the shape of the noise, which changes much more slowly than the curvature of
    methods that measure it in every update.

    Args:
        group: The parameter group.
        state: The optimizer state.
        mean: μ.
    """
    store_size(state, mean)
    state["noise_moments"] = _computed_moments(group, state)
    state["noise_arguments"] = _moment_arguments(group, state)


def store_size(state: dict[str, Any], mean: Tensor) -> None:
    """Store r_t in the state of a parameter with the given μ."""
    state["size"] = _computed_size(state, mean)


def has_shape(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether the state stores a shape that was computed with the current hyperparameters of the group."""
    return bool(state.get("noise_arguments") == _moment_arguments(group, state))


def _moment_arguments(group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[float, ...]:
    """The hyperparameters that the moments of the noise depend on: p, ε and, with per-weight priors, Ñ/τ."""
    hyperparameters = effective(group)
    if "prior_precision" in state:
        return without_prior(hyperparameters).stated_damping, hyperparameters.noise_flatness, hyperparameters.scale
    return hyperparameters.stated_damping, hyperparameters.noise_flatness


def _moments_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """mean_j [1 / (s_j + γ_t)] and γ_t, ``[2]``: as stored last, or of the current curvature if none are valid."""
    return state["noise_moments"] if has_shape(group, state) else _computed_moments(group, state)


def _computed_moments(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    hyperparameters, (curvature,) = noise_terms(group, [state])
    return noise_moments(curvature, hyperparameters.stated_damping, hyperparameters.noise_flatness)


def _size_of(state: Mapping[str, Any], mean: Tensor) -> Tensor:
    """r_t, a scalar: as stored last, or of `mean` before that."""
    return state["size"] if "size" in state else _computed_size(state, mean)


def _computed_size(state: Mapping[str, Any], mean: Tensor) -> Tensor:
    return tensor_sizes([mean], [state["initial_rms"]])[0]


def damping_of(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> Tensor | float:
    """γ_t of a parameter, prior included; arguments as in `layer_shape`."""
    if "input_factor" in state:
        return layer_shape(group, state, mean).damping
    shape, prior = shape_of(group, [state], [mean]), prior_of(group, state)
    if shape is None:
        return prior + effective(group).noise_damping
    return shape.damping[0] + prior if "prior_precision" in state else shape.damping[0]


def temperature_of(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> Tensor | None:
    """τ_t, or None: without noise, before the first update, or for a bias in a matrix. Arguments as in `layer_shape`."""
    if not (group["noisy"] and state.get("noisy") and state.get("step")):
        return None
    hyperparameters = effective(group)
    if "input_factor" in state:
        return hyperparameters.num_data / layer_shape(group, state, mean).scale
    if "curvature" not in state:
        return None
    shape = shape_of(group, [state], [mean])
    if shape is None:
        return mean.new_tensor(hyperparameters.kl_weight)
    return hyperparameters.num_data / shape.scale[0]


def effective_parameters(curvature: Tensor, damping: Tensor | float) -> Tensor:
    """Number of parameters that the data determine: Σ_i s_i / (s_i + γ), prior included in γ, negative s_i counted as 0."""
    positive = curvature.clamp_min(0)
    return (positive / (positive + damping)).sum()


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
    size = _size_of(state, weight)
    return noise_scale(variance, size, hyperparameters.relative_noise, hyperparameters.scale)


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
    curvature = KroneckerProduct(state["output_factor"], state["input_factor"])
    damping = layer_damping(curvature, hyperparameters)
    scale: Tensor | float = hyperparameters.scale
    if hyperparameters.relative_noise is not None:
        root = pi_damped(curvature, damping).inverse_root("a layer")
        scale = layer_scale(mean_variance(root), state, weight, hyperparameters)
    return NoiseShape(
        *(torch.as_tensor(number, dtype=weight.dtype, device=weight.device) for number in (scale, damping))
    )
