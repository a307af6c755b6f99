"""The posterior of an optimizer or of a Lightning checkpoint, which is read without executing code from it.

What the noise is drawn with stands in the states (`optim.covariance`); the groups give only the prior and N.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.errors import PosteriorError
from lightning_bayes.likelihood import Likelihood
from lightning_bayes.likelihood.value import stored_likelihood
from lightning_bayes.optim.covariance import diagonal, kronecker
from lightning_bayes.optim.covariance.diagonal import is_noisy
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.groups import FORMAT, state_of
from lightning_bayes.optim.parameters import names_of
from lightning_bayes.optim.weight_prior import stated_prior_of
from lightning_bayes.posteriors import (
    FAMILIES,
    AbstractPosterior,
    MatrixGaussian,
    MeanField,
    ScaledPosterior,
    prior_centre,
    verified_load,
)

WeightPosterior: TypeAlias = MeanField | MatrixGaussian

# Keys of callback states in a checkpoint.
CALLBACK_KEY = "lightning_bayes"  # shared by all variational callbacks, so that a resumed run may change its arguments
POSTERIOR_KEY = "lightning_bayes.posterior"  # a posterior that no optimizer holds, such as Laplace's
CALIBRATION_KEY = "lightning_bayes.Calibration"  # the width and temperature that validation has chosen


class Entry(NamedTuple):
    """A parameter with its optimizer group and state."""

    name: str
    weights: Tensor  # μ
    group: Mapping[str, Any]
    state: Mapping[str, Any]


def has_noise(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state holds the covariance of noise; the weight of a matrix stands for the whole matrix."""
    return is_noisy(group, state) and "scale" in state


def posterior_of(entries: Iterable[Entry]) -> WeightPosterior:
    """The posterior of the parameters with noise: copies of means and precisions, without constants."""
    by_name = {entry.name: entry for entry in entries}
    owners = {name: entry for name, entry in by_name.items() if has_noise(entry.group, entry.state)}
    matrices = {name: entry for name, entry in owners.items() if "input_factor" in entry.state}
    products = {name: kronecker.layer_precision(entry.state) for name, entry in matrices.items()}
    factors = {name: (product.left, product.right) for name, product in products.items()}
    biases = {  # of the matrices with a column for the bias
        name: name.removesuffix("weight") + "bias"
        for name, entry in matrices.items()
        if entry.state["input_factor"].shape[-1] > entry.weights[0].numel()
    }
    independent = [name for name in owners if name not in matrices]
    precisions = diagonal.precisions([owners[name].state for name in independent]) if independent else []
    owners |= {bias: owners[name] for name, bias in biases.items()}  # a matrix has the prior of its weight
    owners = {name: owners[name] for name in by_name if name in owners}
    mean = {name: by_name[name].weights.detach().clone() for name in owners}
    centres = {name: _prior_mean(by_name[name], owner) for name, owner in owners.items()}
    prior: dict[str, Any] = {name: _prior_precision(owner) for name, owner in owners.items()}
    num_data = max((float(owner.group["posterior"]["num_data"]) for owner in owners.values()), default=0.0)
    prior_mean = {name: centre for name, centre in centres.items() if centre is not None}
    weights = dict(zip(independent, precisions, strict=True))
    if not matrices:
        return MeanField(mean, weights, prior, num_data, prior_mean=prior_mean)
    # Kronecker methods refuse priors of each weight.
    return MatrixGaussian(mean, factors, biases, weights, prior, num_data, prior_mean=prior_mean)


def posterior_of_model(
    model: nn.Module,
    trained: Iterable[tuple[Mapping[str, Any], nn.Parameter]],
    states: Mapping[Tensor, Mapping[str, Any]],
    likelihood: Likelihood | None,
) -> WeightPosterior:
    """The posterior of a model at its mean; parameters without noise and buffers are among the constants."""
    pairs = list(trained)
    names = names_of(model, [param for _, param in pairs])
    entries = zip(names, pairs, strict=True)
    posterior = posterior_of(Entry(name, param, group, states[param]) for name, (group, param) in entries)
    constants = constants_of(model.state_dict(), posterior.mean)
    copied = replace(posterior, constants={name: value.detach().clone() for name, value in constants.items()})
    return copied.with_likelihood(likelihood)


def constants_of(values: Mapping[str, Any], mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict that are not part of the posterior with this mean."""
    return {name: value for name, value in values.items() if name not in mean and isinstance(value, Tensor)}


def effective_parameters(
    trained: Iterable[tuple[Mapping[str, Any], nn.Parameter]], states: Mapping[Tensor, Mapping[str, Any]]
) -> Tensor:
    """Σ_i s_i / (s_i + γ_t) over the weights with noise, a scalar; negative s_i count as 0."""
    counts = []
    for group, param in trained:
        state = states[param]
        if has_noise(group, state) and state["step"]:
            is_matrix = "input_factor" in state
            curvature = kronecker.layer_product(state, "factor").diagonal() if is_matrix else state["curvature"]
            positive = curvature.clamp_min(0)
            counts.append((positive / (positive + state["damping"])).sum())
    return torch.stack(counts).sum() if counts else torch.zeros(())


def _prior_precision(entry: Entry) -> float | Tensor:
    """δ of a parameter's prior in the tempered bound, for each weight where it differs."""
    group, state = entry.group, entry.state
    if effective(group).relative_noise is None:
        per_weight: Tensor | None = state.get("prior_precision")
        return effective(group).prior_precision if per_weight is None else per_weight.clone()
    shaped: float | Tensor = state["scale"] * state["damping"]
    return shaped


def _prior_mean(entry: Entry, owner: Entry) -> Tensor | None:
    """The prior's centre for a parameter; None for zero."""
    centre = entry.state.get("prior_mean")
    if effective(owner.group).relative_noise is None:
        return None if centre is None else centre.clone()
    mean, prior = entry.weights.detach(), stated_prior_of(entry.group, entry.state)
    return prior_centre(mean, 0.0 if centre is None else centre, prior, owner.state["damping"])


def load_posterior(path: str | os.PathLike[str], map_location: str | torch.device = "cpu") -> Any:
    """Load the posterior from a checkpoint of a run with one of the callbacks.

    Raises `PosteriorError` if the file is not a Lightning checkpoint or contains no posterior.

    Args:
        path: A Lightning checkpoint (``last.ckpt``): a file.
        map_location: Device of the tensors.

    Returns:
        The posterior with the LightningModule's parameter names; `AbstractPosterior.select` picks a submodule. A
        `ScaledPosterior` if `Calibration` has chosen a width.
    """
    checkpoint = read_checkpoint(path)
    posterior = posterior_from_checkpoint(checkpoint, str(path)).to(map_location)
    posterior = posterior.with_likelihood(likelihood_from_checkpoint(checkpoint))
    scale_state = checkpoint.get("callbacks", {}).get(CALIBRATION_KEY, {})
    if scale_state.get("scale") is None:
        return posterior
    scale, linearized, temperature = (scale_state[key] for key in ("scale", "linearized", "temperature"))
    inputs = scale_state.get("input_means", {})
    return ScaledPosterior(posterior, scale, linearized, temperature, inputs).to(map_location)


def likelihood_from_checkpoint(checkpoint: Mapping[str, Any]) -> Likelihood | None:
    """What the training loss of a fit says about the network's outputs; None if no callback has stored it."""
    states = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    found = (stored_likelihood(state) for state in states if "likelihood" in state or "link" in state)
    return next((likelihood for likelihood in found if likelihood.outputs), None)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a Lightning checkpoint without executing code; raises `PosteriorError` if it is damaged or another file."""
    return require_checkpoint(verified_load(path), path)


def require_checkpoint(checkpoint: object, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of the file `path`; raise `PosteriorError` if they have no ``state_dict``."""
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise PosteriorError(f"{path} is not a Lightning checkpoint: it has no 'state_dict'.")
    return checkpoint


def callback_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the variational callback in a checkpoint; empty if the run had none."""
    state: dict[str, Any] = checkpoint.get("callbacks", {}).get(CALLBACK_KEY, {})
    return state


def stored_posterior(checkpoint: Mapping[str, Any]) -> AbstractPosterior | None:
    """Return the posterior that a callback such as `LaplaceCallback` has saved, or None."""
    state = checkpoint.get("callbacks", {}).get(POSTERIOR_KEY, {})
    if "family" not in state:
        return None
    saved: Any = FAMILIES[state["family"]].from_state_dict(state["posterior"])
    posterior: AbstractPosterior = replace(saved, constants=constants_of(checkpoint["state_dict"], saved.mean))
    return posterior


def posterior_from_checkpoint(checkpoint: dict[str, Any], source: str = "The checkpoint") -> AbstractPosterior:
    """Build the posterior of a loaded checkpoint, without `Calibration`'s width; `source` is its name in messages."""
    stored = stored_posterior(checkpoint)
    if stored is not None:
        return stored
    names = callback_state(checkpoint).get("param_names")
    states = checkpoint.get("optimizer_states")
    if not names or not states:
        raise PosteriorError(
            f"{source} holds no posterior: it was saved without a callback such as VOGNCallback, or with "
            "save_weights_only=True. Train with the callback and save full checkpoints."
        )
    if states[0].get("format") != FORMAT:
        raise PosteriorError(
            f"{source} has format {states[0].get('format')!r}, and this version reads format {FORMAT}. Read it with the "
            "version that wrote it."
        )
    posterior = posterior_of(_entries(checkpoint, names, states[0]))
    if not posterior.mean:
        raise PosteriorError(
            f"{source} was saved before the first update of the posterior, or by a method without noise such as OGN."
        )
    return replace(posterior, constants=constants_of(checkpoint["state_dict"], posterior.mean))


def _entries(checkpoint: dict[str, Any], names: list[list[str]], optimizer: dict[str, Any]) -> Iterator[Entry]:
    """Yield the parameters with at least one update; before that they have no posterior."""
    weights = checkpoint["state_dict"]
    for group, group_names in zip(optimizer["param_groups"], names, strict=True):
        for index, name in zip(group["params"], group_names, strict=True):
            state = state_of(optimizer).get(index, {})
            if state.get("step"):
                # A weight that torch.nn.utils.prune masks has two names; ModelPruning saves it without its mask.
                held = next(n for n in (name, f"{name}_orig", name.removesuffix("_orig")) if n in weights)
                yield Entry(held, weights[held], group, state)
