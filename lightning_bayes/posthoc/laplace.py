"""The Laplace approximation around the weights of a trained network.

    q(θ) = N(θ*, (Σ_i J_iᵀ H_i J_i + Δ)⁻¹)        θ* the current weights, Δ the prior precision

Laplace 1774; for networks MacKay 1992; with Kronecker factors Ritter et al. 2018, https://openreview.net/forum?id=Skdvd2xAZ;
last layers, all curvatures and their predictives Daxberger et al. 2021, https://arxiv.org/abs/2106.14806.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, final, get_args

import torch
from torch import nn

from lightning_bayes.curvature.likelihood import Bernoulli, Gaussian, Likelihood, Poisson, Softmax
from lightning_bayes.curvature.output_roots import CurvatureName, check_curvature, root_columns
from lightning_bayes.curvature.parameters import require_full_precision
from lightning_bayes.curvature.selection import last_called, only_trained
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError, name_some
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.posthoc.batches import labelled, require_evaluation_mode
from lightning_bayes.posthoc.evidence import RANGE, Evidence, log_evidence, maximise
from lightning_bayes.posthoc.full import Full
from lightning_bayes.posthoc.kronecker import Kronecker
from lightning_bayes.posthoc.structure import AbstractStructure
from lightning_bayes.posthoc.trained import TrainingFit
from lightning_bayes.posthoc.validation import RANGE as VALIDATION_RANGE
from lightning_bayes.posthoc.validation import choose_by_validation
from lightning_bayes.predictive import LikelihoodName, Link, find_link

StructureName: TypeAlias = Literal["diagonal", "kronecker", "full"]
PriorPrecision: TypeAlias = float | Literal["marglik", "validation"]
PriorStructure: TypeAlias = Literal["scalar", "layerwise"]

_LIKELIHOODS: dict[Link, Likelihood] = {
    "softmax": Softmax(),
    "sigmoid": Bernoulli(),
    "identity": Gaussian(1.0),
    "exp": Poisson(),
}
_LINKS: dict[type[Likelihood], Link] = {type(likelihood): link for link, likelihood in _LIKELIHOODS.items()}
_EDGE: Final = 0.1  # of the logarithm: twice the tolerance of the search
_STRUCTURES: Final[dict[str, Callable[[nn.Module, dict[str, nn.Parameter]], AbstractStructure]]] = {
    "diagonal": partial(Kronecker, diagonal=True),
    "kronecker": Kronecker,
    "full": Full,
}


@final
@dataclass(frozen=True)
class Laplace:
    """The result of `laplace`.

    Attributes:
        posterior: The posterior, for example for `mc_predict` and `lightning_bayes.zoo.save_posterior`.
        likelihood: The likelihood of the targets, with the chosen noise.
        log_marginal_likelihood: Laplace approximation of log p(D) in nats, at the posterior's prior and noise.
        prior_precision: δ by parameter name.
        at_edge: Names of the parameters whose δ is the smallest or largest that the search tries: the best is beyond it.
    """

    posterior: AbstractPosterior
    likelihood: Likelihood
    log_marginal_likelihood: float
    prior_precision: dict[str, float]
    at_edge: tuple[str, ...] = ()


@torch.no_grad()
def laplace(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood | LikelihoodName = "classification",
    structure: StructureName = "kronecker",
    subset: str = "last_layer",
    curvature: CurvatureName = "ggn",
    prior_precision: PriorPrecision = "marglik",
    *,
    prior_structure: PriorStructure = "scalar",
    validation: Iterable[Any] | None = None,
    mc_samples: int = 1,
    seed: int = 0,
    require_trained: bool = True,
) -> Laplace:
    """Approximate the posterior of a trained network. The network's weights do not change.

    Raises `UnsupportedTrainingError` if the network was not trained, has BatchNorm in training mode or half-precision
    weights; `DataError` if the loader yields no labels; `PosteriorError` if a full matrix is too large; and
    `UnsupportedLayerError` if the curvature of a parameter cannot be measured.

    Args:
        model: The network, unmodified and in evaluation mode, with any layers that `measure` supports.
        loader: Training data as pairs (inputs, targets). It is read once; ``subset="last_layer"`` also reads its first batch
            before, so an iterator would lose that batch.
        likelihood: ``"classification"`` (logits ``[B, C]``, class indices ``[B]``), ``"binary"`` or ``"multilabel"``
            (one logit per label), or ``"regression"`` (noise chosen together with the prior). Or a likelihood of
            `lightning_bayes.curvature`, such as ``Gaussian(0.1)`` for known noise.
        structure: ``"diagonal"``, ``"kronecker"`` (eigendecomposed factors), or ``"full"`` for last layers and small models.
        subset: ``"last_layer"``, ``"all"``, or a regular expression that is searched in parameter names. Parameters that do
            not require gradients are left out.
        curvature: ``"ggn"`` is exact and equals the true Fisher of these likelihoods. ``"fisher"`` estimates it from
            `mc_samples` drawn labels, which is cheaper for many outputs. ``"empirical_fisher"`` uses the given labels.
        prior_precision: δ. Or ``"marglik"`` for the highest marginal likelihood, or ``"validation"`` for the lowest NLL of
            the linearised prediction on `validation`.
        prior_structure: ``"scalar"`` for one δ, ``"layerwise"`` for one δ per layer.
        validation: Held-out data as pairs (inputs, targets), for ``prior_precision="validation"``.
        mc_samples: Labels drawn per example for ``"fisher"``.
        seed: Seed of the drawn labels.
        require_trained: Whether to refuse a network that predicts no better than a constant.

    Returns:
        The posterior, its likelihood and marginal likelihood.

    Raises:
        HyperparameterError: If an argument is invalid, or two arguments are incompatible.
    """
    check_settings(structure, prior_precision, prior_structure)
    check_curvature(curvature, mc_samples)
    if (prior_precision == "validation") != (validation is not None):
        raise HyperparameterError(
            f"prior_precision={prior_precision!r} and validation={type(validation).__name__} are incompatible. Pass a "
            "loader as validation=... with prior_precision='validation', and only then."
        )
    likelihood, chooses_noise = find_likelihood(likelihood)
    std, unit_likelihood = 1.0, likelihood
    if isinstance(likelihood, Gaussian):
        std, unit_likelihood = likelihood.std, Gaussian(1.0)
    require_evaluation_mode(model)
    names = chosen_names(model, subset, loader)
    with only_trained(model, names) as params:
        require_full_precision(params.values())
        measured = _STRUCTURES[structure](model, params)
        training = _measure(measured, loader, unit_likelihood, curvature, mc_samples, seed)
        if require_trained:
            training.require_trained(type(model).__name__)
    evidence = Evidence(measured, training, -4 if curvature == "empirical_fisher" else -2)
    groups = _prior_groups(params, prior_structure)
    fixed_delta = None if isinstance(prior_precision, str) else float(prior_precision)
    deltas, std = maximise(evidence, groups, std, fixed_delta, chooses_noise)
    if validation is not None:
        delta, std = choose_by_validation(evidence, validation, likelihood, std, chooses_noise)
        deltas = [delta]
    prior = {name: deltas[index] for name, index in groups.items()}
    log_marginal = log_evidence(evidence, prior, std)  # before the posterior, because both need much memory
    likelihood = Gaussian(std) if isinstance(likelihood, Gaussian) else likelihood
    searched = RANGE if validation is None else VALIDATION_RANGE
    at_edge = () if fixed_delta is not None else _warned_of_edges(prior, searched)
    return Laplace(evidence.posterior(prior, std), likelihood, log_marginal, prior, at_edge)


def check_settings(structure: str, prior_precision: float | str, prior_structure: str) -> None:
    """Raise a `HyperparameterError` for unknown names or a prior precision that is not positive."""
    for name, value, choices in (
        ("structure", structure, get_args(StructureName)),
        ("prior_structure", prior_structure, get_args(PriorStructure)),
    ):
        if value not in choices:
            raise HyperparameterError(f"{name}={value!r} is unknown; use {', '.join(map(repr, choices))}.")
    if isinstance(prior_precision, str):
        if prior_precision not in {"marglik", "validation"}:
            raise HyperparameterError(
                f"prior_precision={prior_precision!r} is unknown; use 'marglik', 'validation' or a positive number."
            )
    elif not 0 < prior_precision < math.inf:
        raise HyperparameterError(f"prior_precision={prior_precision!r} must be positive and finite.")
    if prior_precision == "validation" and prior_structure != "scalar":
        raise HyperparameterError(
            "prior_precision='validation' chooses one number. Use prior_structure='scalar', or prior_precision='marglik'."
        )


def find_likelihood(likelihood: Likelihood | LikelihoodName) -> tuple[Likelihood, bool]:
    """Return the likelihood and whether to choose its noise, which then starts at σ = 1."""
    if isinstance(likelihood, Likelihood):
        return likelihood, False
    link = find_link(likelihood, "likelihood")
    if link not in _LIKELIHOODS:
        raise HyperparameterError(f"likelihood={likelihood!r} is not supported: classes must be the second dimension.")
    return _LIKELIHOODS[link], link == "identity"


def link_of(likelihood: Likelihood) -> Link:
    """Return the link that turns outputs into predictions under this likelihood."""
    return _LINKS.get(type(likelihood), "softmax")


def _warned_of_edges(prior: dict[str, float], bounds: tuple[float, float]) -> tuple[str, ...]:
    """The names whose prior precision ended at a bound of its search, with a warning if there are any."""
    distance = {name: min(abs(math.log(delta / bound)) for bound in bounds) for name, delta in prior.items()}
    names = tuple(name for name, gap in distance.items() if gap < _EDGE)
    if names:
        warnings.warn(
            f"The search for the prior precision ended at an edge of its range, {bounds[0]:g} to {bounds[1]:g}, for "
            f"{name_some(names)} ({prior[names[0]]:.3g}): no prior in it fits, and the width is that of the edge, "
            "not of the data. Train the network longer, choose other parameters with subset=, or pass prior_precision= as a "
            "number.",
            stacklevel=4,
        )
    return names


def _prior_groups(params: Iterable[str], prior_structure: PriorStructure) -> dict[str, int]:
    """Index of the prior precision of each parameter."""
    layers = {name: name.rpartition(".")[0] if prior_structure == "layerwise" else "" for name in params}
    distinct = list(dict.fromkeys(layers.values()))
    return {name: distinct.index(layer) for name, layer in layers.items()}


def chosen_names(model: nn.Module, subset: str, loader: Iterable[Any]) -> list[str]:
    """Names of the parameters of a subset."""
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    if subset == "all":
        selected = names
    elif subset == "last_layer":
        inputs, _ = next(labelled(loader, next(model.parameters()).device))
        layer = last_called(model, inputs)
        selected = [name for name in names if name.startswith(f"{layer}." if layer else "")]
    else:
        selected = [name for name in names if re.search(subset, name)]
    if not selected:
        raise UnsupportedLayerError(
            f"subset={subset!r} matches no parameter that requires gradients; {type(model).__name__} has "
            f"{name_some(names) or 'none'}. Pass subset='last_layer', subset='all', or a regular expression for these names."
        )
    return selected


def _measure(
    measured: AbstractStructure,
    loader: Iterable[Any],
    likelihood: Likelihood,
    curvature: CurvatureName,
    mc_samples: int,
    seed: int,
) -> TrainingFit:
    """Measure the curvature and the fit of the training data in one pass."""
    training, model = TrainingFit(likelihood), measured.model
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for inputs, targets in labelled(loader, device):
        columns = root_columns(curvature, likelihood, targets, mc_samples, generator)
        with torch.enable_grad():
            outputs = measured.measure(lambda inputs=inputs: model(inputs), columns)  # type: ignore[misc]
        training.update(outputs, targets)
    return training
