"""The noise of any parameter, from its parameter group and optimizer state.

The weight of a matrix stands for the whole matrix; its bias has no numbers of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.readout.layer import layer_product, layer_shape, store_size
from lightning_bayes.optim.readout.noise_terms import is_noisy, shape_of, store_statistics
from lightning_bayes.optim.weight_prior import prior_of
from lightning_bayes.posteriors import NoiseShape


def parameter_shape(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> NoiseShape | None:
    """The shape of a parameter's noise, two scalars; None for the noise of the bound. Arguments as in `layer_shape`."""
    if group["posterior"].get("relative_noise") is None:
        return None
    if "input_factor" in state:
        return layer_shape(group, state, mean)
    shape = shape_of(group, [state], [mean])
    return shape and NoiseShape(shape.scale[0], shape.damping[0])


def store_shape(group: Mapping[str, Any], state: dict[str, Any], mean: Tensor) -> None:
    """Store the numbers that determine the shape of a parameter's noise, if it has one. Arguments as in `layer_shape`."""
    if not group["posterior"]["relative_noise"]:
        return
    if "input_factor" in state:
        store_size(state, mean)
    elif is_noisy(group, state) and "curvature" in state:
        store_statistics(group, state, mean)


def damping_of(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> Tensor | float:
    """γ_t of a parameter, prior included; arguments as in `layer_shape`."""
    shape, prior = parameter_shape(group, state, mean), prior_of(group, state)
    if shape is None:
        return prior + effective(group).noise_damping
    return shape.damping + prior if "prior_precision" in state else shape.damping


def temperature_of(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> Tensor | None:
    """τ_t, or None: without noise, before the first update, or for a bias in a matrix. Arguments as in `layer_shape`."""
    if not _has_curvature(group, state):
        return None
    hyperparameters, shape = effective(group), parameter_shape(group, state, mean)
    if shape is None:
        return mean.new_tensor(hyperparameters.kl_weight)
    return hyperparameters.num_data / shape.scale


def effective_parameters(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> Tensor | None:
    """Number of weights that the data determine, Σ_i s_i / (s_i + γ_t).

    Args:
        group: See `layer_shape`.
        state: See `layer_shape`.
        mean: μ.

    Returns:
        A scalar, with the prior included in γ_t and negative s_i counted as 0; None where `temperature_of` is None.
    """
    if not _has_curvature(group, state):
        return None
    is_matrix = "input_factor" in state
    curvature = layer_product(state, "factor").diagonal() if is_matrix else state["curvature"]
    positive = curvature.clamp_min(0)
    return (positive / (positive + damping_of(group, state, mean))).sum()


def _has_curvature(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a parameter has noise and a measured curvature of its own."""
    is_measured = bool(state.get("step")) and ("input_factor" in state or "curvature" in state)
    return is_measured and is_noisy(group, state)
