"""From an optimizer's state, live or in a checkpoint, to the posterior."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from lightning_bayes.posteriors.layer_precision import layer_precision
from lightning_bayes.posteriors.matrix_gaussian import MatrixGaussian
from lightning_bayes.posteriors.mean_field import MeanField
from lightning_bayes.posteriors.precision import state_precision

WeightPosterior: TypeAlias = MeanField | MatrixGaussian


class Entry(NamedTuple):
    """One parameter."""

    name: str
    weights: Tensor  # μ
    group: Mapping[str, Any]  # its parameter group
    state: Mapping[str, Any]  # its optimizer state


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
    precision = {name: found for name, entry in known.items() if (found := _single(entry)) is not None}
    noisy = {name: known[of_weight.get(name, name)] for name in known if name in {*precision, *layers, *of_weight}}
    mean = {name: known[name].weights.detach().clone() for name in noisy}
    prior_precision = {name: float(entry.group["prior_precision"]) for name, entry in noisy.items()}
    prior_mean = {n: known[n].state["prior_mean"].clone() for n in noisy if "prior_mean" in known[n].state}
    num_data = max((float(entry.group["num_data"]) for entry in noisy.values()), default=0.0)
    if not layers:
        return MeanField(mean, precision, prior_precision, num_data, prior_mean=prior_mean)
    return MatrixGaussian(mean, layers, biases, precision, prior_precision, num_data, prior_mean=prior_mean)


def _single(entry: Entry) -> Tensor | None:
    """1/Σ of a parameter in no matrix."""
    return state_precision(entry.group, entry.state, entry.weights) if "curvature" in entry.state else None


def _matrix(entry: Entry) -> tuple[Tensor, Tensor] | None:
    """L and R of a layer's weight."""
    found = layer_precision(entry.group, entry.state, entry.weights) if "input_factor" in entry.state else None
    return None if found is None else (found.left, found.right)


def _bias_in_matrix(entry: Entry) -> str | None:
    """Name of the bias that is the last column of a weight's matrix: then the matrix is one column wider."""
    has_bias = entry.state["input_factor"].shape[-1] > entry.weights[0].numel()
    return entry.name.removesuffix("weight") + "bias" if has_bias else None
