"""The noise of a layer's matrix, from the parameter group and the optimizer state of its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.hyperparameters import effective
from lightning_bayes.posteriors import kronecker_precision, noise_floor, precision, tensor_sizes


def layer_noise_damping(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> Tensor:
    """The damping of the noise beside the prior: γ if it counts there, and the noise floor.

    The floor 1/(κr)² of `noise_floor` is a precision, so as a damping of the mean curvature it is γ_l = (τ/Ñ)/(κr)².

    Args:
        group: The parameter group of the layer's weight.
        state: Its optimizer state.
        weight: μ.

    Returns:
        γ + γ_l, a scalar.
    """
    now = effective(group)
    return now.noise_damping + _floor(group, state, weight) / now.scale


def layer_precision(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> KroneckerProduct | None:
    """Posterior precision of a layer's matrix, as if its factors were inverted now; arguments as in `layer_noise_damping`.

    Returns:
        L ⊗ R, or None where there is no noise.
    """
    if not group["noisy"] or not state["noisy"]:
        return None
    arguments: dict[str, Any] = effective(group).precision_arguments
    arguments["damping"] = layer_noise_damping(group, state, weight)
    return kronecker_precision(_curvature(state), **arguments)


def layer_floored(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> Tensor:
    """The number of weights of a layer whose noise the floor sets; arguments as in `layer_noise_damping`.

    Returns:
        The number of entries S_ii A_jj of the curvature's diagonal that alone would allow more noise than κr.
    """
    without_floor = precision(_curvature(state).diagonal(), **effective(group).precision_arguments)
    return (without_floor < _floor(group, state, weight)).sum()


def _curvature(state: Mapping[str, Any]) -> KroneckerProduct:
    return KroneckerProduct(state["output_factor"], state["input_factor"])


def _floor(group: Mapping[str, Any], state: Mapping[str, Any], weight: Tensor) -> Tensor:
    return noise_floor(effective(group).relative_noise, tensor_sizes([weight], [state["scale"]]))[0]
