"""The shape of a parameter's noise, from its parameter group and optimizer state; see `posteriors.shaped_noise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct, pi_damped
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.weight_prior import noise_curvature, noise_hyperparameters, prior_of
from lightning_bayes.posteriors import (
    NoiseShape,
    noise_damping,
    noise_scale,
    noise_shape,
    noise_statistics,
    tensor_sizes,
)

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
    hyperparameters = noise_hyperparameters(group, states[0])
    if hyperparameters.relative_noise is None:
        return None
    statistics = stored_statistics(group, states)
    if statistics is None:
        statistics = [_current_statistics(hyperparameters, *pair) for pair in zip(states, means, strict=True)]
    return noise_shape(torch.stack(statistics), hyperparameters.relative_noise, hyperparameters.scale)


def store_statistics(group: Mapping[str, Any], state: dict[str, Any], mean: Tensor) -> None:
    """Store the statistics that determine the shape of the noise of a parameter with a diagonal posterior.

    They change much more slowly than the curvature of methods that measure it in every update.

    Args:
        group: The parameter group.
        state: The optimizer state.
        mean: μ.
    """
    hyperparameters = noise_hyperparameters(group, state)
    state["noise_statistics"] = _current_statistics(hyperparameters, state, mean)
    state["noise_statistics_of"] = _arguments(hyperparameters, state)


def stored_statistics(group: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> list[Tensor] | None:
    """The statistics in the states of a cohort; None unless all were stored with the current hyperparameters."""
    arguments = _arguments(noise_hyperparameters(group, states[0]), states[0])
    if any(state.get("noise_statistics_of") != arguments for state in states):
        return None
    return [state["noise_statistics"] for state in states]


def _current_statistics(hyperparameters: Effective, state: Mapping[str, Any], mean: Tensor) -> Tensor:
    curvature = noise_curvature(hyperparameters, state)
    stated, flatness = hyperparameters.stated_damping, hyperparameters.noise_flatness
    return noise_statistics(curvature, mean, state["initial_rms"], stated, flatness)


def _arguments(hyperparameters: Effective, state: Mapping[str, Any]) -> tuple[float, ...]:
    """The hyperparameters that the statistics depend on: p, ε and, with per-weight priors, Ñ/τ."""
    scale = (hyperparameters.scale,) if "prior_precision" in state else ()
    return hyperparameters.stated_damping, hyperparameters.noise_flatness, *scale


def store_size(state: dict[str, Any], mean: Tensor) -> None:
    """Store r_t in the state of a layer's weight; `mean` is μ."""
    state["size"] = _current_size(state, mean)


def _current_size(state: Mapping[str, Any], mean: Tensor) -> Tensor:
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
    size = state["size"] if "size" in state else _current_size(state, weight)
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
