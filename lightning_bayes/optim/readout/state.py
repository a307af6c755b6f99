"""The posterior from parameter groups and optimizer states, of a live optimizer or of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.readout.layer import layer_precision
from lightning_bayes.optim.readout.noise_terms import is_noisy, noise_curvature, noise_hyperparameters
from lightning_bayes.optim.readout.parameter import parameter_shape
from lightning_bayes.optim.weight_prior import stated_prior_of
from lightning_bayes.posteriors import MatrixGaussian, MeanField, NoiseShape, precision, prior_centre, shaped_precision

WeightPosterior: TypeAlias = MeanField | MatrixGaussian


class Entry(NamedTuple):
    """A parameter with its optimizer group and state."""

    name: str
    weights: Tensor  # μ
    group: Mapping[str, Any]
    state: Mapping[str, Any]


def state_precision(group: Mapping[str, Any], state: Mapping[str, Any], mean: Tensor) -> Tensor | None:
    """Posterior precision of a parameter with a diagonal posterior.

    Args:
        group: Its parameter group.
        state: Its optimizer state.
        mean: μ, shaped like the parameter.

    Returns:
        1/Σ, shaped like the parameter; None if the parameter is deterministic, or has no measured or initial precision.
    """
    if not is_noisy(group, state) or (state["step"] == 0 and group["posterior"]["init_precision"] is None):
        return None
    shape = parameter_shape(group, state, mean)
    hyperparameters = noise_hyperparameters(group, state)
    curvature = noise_curvature(hyperparameters, state)
    if shape is None:
        return precision(curvature, **hyperparameters.precision_arguments)
    return shaped_precision(curvature, *shape)


def posterior_of(entries: Iterable[Entry]) -> WeightPosterior:
    """Build the posterior of the parameters that are sampled with noise.

    Args:
        entries: The parameters of an optimizer.

    Returns:
        Copies of means and precisions, without constants; empty if no parameter has noise.
    """
    by_name = {entry.name: entry for entry in entries}
    diagonal: dict[str, Tensor] = {}
    factors: dict[str, tuple[Tensor, Tensor]] = {}  # L and R of each layer, under the name of its weight
    weight_of: dict[str, str] = {}  # the weight of each bias that is a column of its matrix
    for name, (_, weights, group, state) in by_name.items():
        if "input_factor" in state:
            product = layer_precision(group, state, weights)
            if product is not None:
                factors[name] = product.left, product.right
                if state["input_factor"].shape[-1] > weights[0].numel():
                    weight_of[name.removesuffix("weight") + "bias"] = name
        elif "curvature" in state:
            values = state_precision(group, state, weights)
            if values is not None:
                diagonal[name] = values
    with_noise = {*diagonal, *factors, *weight_of}
    # A matrix has the prior of its weight.
    owners = {name: by_name[weight_of.get(name, name)] for name in by_name if name in with_noise}
    shapes = {entry.name: parameter_shape(entry.group, entry.state, entry.weights) for entry in owners.values()}
    prior_precision: dict[str, Any] = {}
    prior_mean: dict[str, Tensor] = {}
    for name, owner in owners.items():
        prior_precision[name] = _prior_precision(owner, shapes[owner.name])
        centre = _prior_mean(by_name[name], shapes[owner.name])
        if centre is not None:
            prior_mean[name] = centre
    mean = {name: by_name[name].weights.detach().clone() for name in owners}
    num_data = max((float(owner.group["posterior"]["num_data"]) for owner in owners.values()), default=0.0)
    if not factors:
        return MeanField(mean, diagonal, prior_precision, num_data, prior_mean=prior_mean)
    biases = {weight: bias for bias, weight in weight_of.items()}
    scalars = {name: float(delta) for name, delta in prior_precision.items()}  # Kronecker methods refuse other priors
    return MatrixGaussian(mean, factors, biases, diagonal, scalars, num_data, prior_mean=prior_mean)


def posterior_of_model(
    model: nn.Module,
    trained: Iterable[tuple[Mapping[str, Any], nn.Parameter]],
    states: Mapping[Tensor, Mapping[str, Any]],
) -> WeightPosterior:
    """Read the posterior of a model.

    Args:
        model: The model, at its posterior mean.
        trained: Its trained parameters with their groups.
        states: Optimizer states by parameter.

    Returns:
        Copies of mean and precision by name; parameters without noise and buffers are among the constants.
    """
    names = {param: name for name, param in model.named_parameters()}
    entries = (Entry(names[param], param, group, states[param]) for group, param in trained)
    posterior = posterior_of(entries)
    constants = constants_of(model.state_dict(), posterior.mean)
    copies = {name: value.detach().clone() for name, value in constants.items()}
    return replace(posterior, constants=copies)


def constants_of(values: Mapping[str, Any], mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict that are not part of the posterior with this mean."""
    return {name: value for name, value in values.items() if name not in mean and isinstance(value, Tensor)}


def _prior_precision(entry: Entry, shape: NoiseShape | None) -> float | Tensor:
    """δ of a parameter, or of each weight if the parameter has per-weight priors."""
    per_weight: Tensor | None = entry.state.get("prior_precision")
    if per_weight is None:
        return float(effective(entry.group).prior_precision if shape is None else shape.prior_precision)
    if shape is None:
        return per_weight.clone()
    return (effective(entry.group).prior_of(per_weight) + shape.damping) * shape.scale


def _prior_mean(entry: Entry, shape: NoiseShape | None) -> Tensor | None:
    """The prior's centre for a parameter; None for zero."""
    stated = entry.state.get("prior_mean")
    if shape is None:
        return None if stated is None else stated.clone()
    prior = stated_prior_of(entry.group, entry.state)
    damping = shape.damping + prior if "prior_precision" in entry.state else shape.damping
    return prior_centre(entry.weights.detach(), 0.0 if stated is None else stated, prior, damping)
