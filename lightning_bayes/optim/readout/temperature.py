"""Damping, temperature and effective parameters of any parameter, from its parameter group and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.readout.layer import layer_shape
from lightning_bayes.optim.readout.noise_terms import shape_of
from lightning_bayes.optim.weight_prior import prior_of


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
