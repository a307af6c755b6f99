"""The posterior from parameter groups and optimizer states, live or in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.readout.layer import layer_precision
from lightning_bayes.optim.readout.shape import layer_shape, shape_of
from lightning_bayes.optim.weight_prior import noise_terms, stated_prior_of
from lightning_bayes.posteriors import MatrixGaussian, MeanField, Shape, precision, prior_centre, shaped_precision

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
    shape, (now, (curvature,)) = shape_of(group, [state], [mean]), noise_terms(group, [state])
    if shape is None:
        return precision(curvature, **now.precision_arguments)
    return shaped_precision(curvature, shape.scale[0], shape.damping[0])


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
    shapes = {name: _shape(entry) for name, entry in noisy.items()}
    prior_precision = {name: _prior_precision(entry, shapes[name]) for name, entry in noisy.items()}
    centres = {name: _prior_mean(known[name], shapes[name]) for name in noisy}
    prior_mean = {name: centre for name, centre in centres.items() if centre is not None}
    num_data = max((float(entry.group["num_data"]) for entry in noisy.values()), default=0.0)
    if not layers:
        return MeanField(mean, single, prior_precision, num_data, prior_mean=prior_mean)
    precisions = {name: float(delta) for name, delta in prior_precision.items()}  # no method with matrices takes others
    return MatrixGaussian(mean, layers, biases, single, precisions, num_data, prior_mean=prior_mean)


def _shape(entry: Entry) -> Shape | None:
    """The shape of a parameter's noise; None where it is that of the bound, whose prior is the stated one."""
    if entry.group.get("relative_noise") is None:
        return None
    if "input_factor" in entry.state:
        return layer_shape(entry.group, entry.state, entry.weights)
    return shape_of(entry.group, [entry.state], [entry.weights])


def _prior_precision(entry: Entry, shape: Shape | None) -> float | Tensor:
    """δ of a parameter, or of each of its weights where they have priors of their own."""
    own = entry.state.get("prior_precision")
    if own is None:
        return float(entry.group["prior_precision"] if shape is None else shape.prior_precision)
    return own.clone() if shape is None else (effective(entry.group).prior_of(own) + shape.damping) * shape.scale


def _prior_mean(entry: Entry, shape: Shape | None) -> Tensor | None:
    """Centre of a parameter's prior; None for zero."""
    stated = entry.state.get("prior_mean")
    if shape is None:
        return None if stated is None else stated.clone()
    strength = stated_prior_of(entry.group, entry.state)
    damping = shape.damping + strength if "prior_precision" in entry.state else shape.damping
    return prior_centre(entry.weights.detach(), 0.0 if stated is None else stated, strength, damping)


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
