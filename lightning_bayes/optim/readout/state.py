"""The posterior from parameter groups and optimizer states, live or in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from lightning_bayes.optim.hyperparameters import effective
from lightning_bayes.optim.readout.layer import layer_precision
from lightning_bayes.posteriors import MatrixGaussian, MeanField, noise_floor, precision, tensor_sizes

WeightPosterior: TypeAlias = MeanField | MatrixGaussian


class Entry(NamedTuple):
    """A parameter with its part of an optimizer."""

    name: str
    weights: Tensor  # μ
    group: Mapping[str, Any]  # its parameter group
    state: Mapping[str, Any]  # its optimizer state


def state_precision(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> Tensor | None:
    """Posterior precision of a parameter outside of matrices.

    Args:
        group: Its parameter group.
        state: Its optimizer state.
        mean: μ, shaped like the parameter.

    Returns:
        1/Σ, or None where there is no noise: a point estimate, or no measurement yet.
    """
    is_point = not group["noisy"] or not state or not state["noisy"]
    if is_point or (state["step"] == 0 and group["init_precision"] is None):
        return None
    now = effective(group)
    floor = noise_floor(now.relative_noise, tensor_sizes([mean], [state["scale"]]))[0]
    return precision(state["curvature"], **now.precision_arguments).add_(floor)


def posterior_of(entries: Iterable[Entry]) -> WeightPosterior:
    """Collect the parameters that have noise.

    Args:
        entries: The parameters of an optimizer.

    Returns:
        Copies of means and precisions, without constants; empty if no parameter has noise.
    """
    known = {entry.name: entry for entry in entries}
    layers = {name: both for name, entry in known.items() if (both := _matrix(entry)) is not None}
    biases = {name: bias for name in layers if (bias := _bias_in_matrix(known[name])) is not None}
    of_weight = {bias: name for name, bias in biases.items()}  # a matrix has the prior of its weight
    single = {name: found for name, entry in known.items() if (found := _single(entry)) is not None}
    noisy = {name: known[of_weight.get(name, name)] for name in known if name in {*single, *layers, *of_weight}}
    mean = {name: known[name].weights.detach().clone() for name in noisy}
    prior_precision = {name: float(entry.group["prior_precision"]) for name, entry in noisy.items()}
    prior_mean = {n: known[n].state["prior_mean"].clone() for n in noisy if "prior_mean" in known[n].state}
    num_data = max((float(entry.group["num_data"]) for entry in noisy.values()), default=0.0)
    if not layers:
        return MeanField(mean, single, prior_precision, num_data, prior_mean=prior_mean)
    return MatrixGaussian(mean, layers, biases, single, prior_precision, num_data, prior_mean=prior_mean)


def _single(entry: Entry) -> Tensor | None:
    """1/Σ of a parameter outside of matrices."""
    return state_precision(entry.group, entry.state, entry.weights) if "curvature" in entry.state else None


def _matrix(entry: Entry) -> tuple[Tensor, Tensor] | None:
    """L and R of a layer, under its weight."""
    found = layer_precision(entry.group, entry.state, entry.weights) if "input_factor" in entry.state else None
    return None if found is None else (found.left, found.right)


def _bias_in_matrix(entry: Entry) -> str | None:
    """Name of the bias in the last column of a weight's matrix, which is then one column wider than the weight."""
    has_bias = entry.state["input_factor"].shape[-1] > entry.weights[0].numel()
    return entry.name.removesuffix("weight") + "bias" if has_bias else None
