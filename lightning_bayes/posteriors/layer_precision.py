"""From the optimizer's state of a layer's matrix to the precision of its noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.posteriors.matrix_gaussian import kronecker_precision
from lightning_bayes.posteriors.precision import group_arguments, noise_floor, tensor_sizes


def layer_noise_damping(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> Tensor:
    """What is added to the curvature in the noise beside the prior: γ if it counts there, and the noise floor.

    The floor 1/(κr)² of `noise_floor` is a precision, so as a damping of the mean curvature it is γ_l = (τ/Ñ)/(κr)².

    Args:
        group: The parameter group of the layer's weight.
        state: Its optimizer state.
        weight: μ.

    Returns:
        γ + γ_l, a scalar.
    """
    arguments = group_arguments(group)
    return arguments["damping"] + _floor(group, state, weight) * (arguments["kl_weight"] / arguments["num_data"])


def layer_precision(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> KroneckerProduct | None:
    """Posterior precision of a layer's matrix, as if its factors were inverted now; arguments as in `layer_noise_damping`.

    Returns:
        L ⊗ R, or None where there is no noise.
    """
    if not group["noisy"] or not state["noisy"]:
        return None
    arguments: dict[str, Any] = group_arguments(group)
    arguments["damping"] = layer_noise_damping(group, state, weight)
    return kronecker_precision(_curvature(state), **arguments)


def layer_floored(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> Tensor:
    """How many weights of a layer have their noise set by the floor; arguments as in `layer_noise_damping`.

    Returns:
        The number of entries S_ii A_jj of the curvature's diagonal that alone would allow more noise than κr.
    """
    arguments = group_arguments(group)
    scale = arguments["num_data"] / arguments["kl_weight"]
    precision = (_curvature(state).diagonal() + arguments["damping"]) * scale + arguments["prior_precision"]
    return (precision < _floor(group, state, weight)).sum()


def _curvature(state: Mapping[str, Any]) -> KroneckerProduct:
    return KroneckerProduct(state["output_factor"], state["input_factor"])


def _floor(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> Tensor:
    return noise_floor(group, tensor_sizes([weight], [state["scale"]]))[0]
