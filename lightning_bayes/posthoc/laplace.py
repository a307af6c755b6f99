"""The Laplace approximation around the weights of a trained network.

    q(θ) = N(θ*, (Σ_i J_iᵀ H_i J_i + Δ)⁻¹)        θ* the current weights, Δ the prior precision

Laplace 1774; for networks MacKay 1992; with Kronecker factors Ritter et al. 2018, https://openreview.net/forum?id=Skdvd2xAZ;
last layers, all curvatures and their predictives Daxberger et al. 2021, https://arxiv.org/abs/2106.14806.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, final, get_args

import torch
from torch import nn

from lightning_bayes.curvature.output_roots import CurvatureName, check_curvature
from lightning_bayes.curvature.parameters import require_full_precision
from lightning_bayes.curvature.selection import last_called, only_trained
from lightning_bayes.errors import HyperparameterError, UnsupportedLayerError, name_some
from lightning_bayes.likelihood import Gaussian, Likelihood, OutputLikelihood, Raw, find_kind
from lightning_bayes.likelihood.names import LikelihoodName, ObservationName
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.posthoc.batches import (
    Reader,
    Reading,
    layers_before_outputs,
    on_device,
    reader,
    require_evaluation_mode,
    with_kinds,
)
from lightning_bayes.posthoc.evidence import RANGE, Evidence, log_evidence, maximise
from lightning_bayes.posthoc.full import Full
from lightning_bayes.posthoc.kronecker import Kronecker
from lightning_bayes.posthoc.structure import AbstractStructure
from lightning_bayes.posthoc.trained import TrainingFit, together
from lightning_bayes.posthoc.validation import RANGE as VALIDATION_RANGE
from lightning_bayes.posthoc.validation import choose_by_validation

StructureName: TypeAlias = Literal["diagonal", "kronecker", "full"]
PriorPrecision: TypeAlias = float | Literal["marglik", "validation"]
PriorStructure: TypeAlias = Literal["scalar", "layerwise"]

LaplaceLikelihood: TypeAlias = Likelihood | OutputLikelihood | LikelihoodName | ObservationName

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
        kinds: The likelihood of the targets of each output that the loss scores, with the chosen noise.
        log_marginal_likelihood: Laplace approximation of log p(D) in nats, at the posterior's prior and noise.
        prior_precision: δ by parameter name.
        at_edge: Names of the parameters whose δ is the smallest or largest that the search tries: the best is beyond it.
    """

    posterior: AbstractPosterior
    kinds: tuple[OutputLikelihood, ...]
    log_marginal_likelihood: float
    prior_precision: dict[str, float]
    at_edge: tuple[str, ...] = ()

    @property
    def likelihood(self) -> OutputLikelihood:
        """The likelihood of the only output; a `HyperparameterError` for several."""
        if len(self.kinds) > 1:
            raise HyperparameterError(f"The loss scores {len(self.kinds)} outputs: their likelihoods are in kinds.")
        return self.kinds[0]


@torch.no_grad()
def laplace(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: LaplaceLikelihood = "classification",
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
    read: Reader | None = None,
) -> Laplace:
    """Approximate the posterior of a trained network. The network's weights do not change.

    Raises `UnsupportedTrainingError` if the network was not trained, has BatchNorm in training mode or half-precision
    weights; `DataError` if the loader yields no labels; `PosteriorError` if a full matrix is too large; and
    `UnsupportedLayerError` if the curvature of a parameter cannot be measured.

    Args:
        model: The network, unmodified and in evaluation mode, with any layers that `measure` supports.
        loader: Training data, whose batches are pairs (inputs, targets) unless `likelihood` is a `Likelihood`. It is read
            once; ``subset="last_layer"`` also reads its first batch before, and a regression with several outputs reads all
            twice, so an iterator would lose batches. Targets that are nan and indices that are no class do not count.
        likelihood: ``"classification"`` (logits ``[B, C]``, class indices ``[B]``), ``"binary"`` or ``"multilabel"``
            (one logit per label), ``"counts"``, ``"mean_variance"`` and its relatives, or ``"regression"``, with a
            noise σ for each of at most 64 columns of ``[B, K]`` or ``[B, T, K]``, else one, chosen with the prior. Or a kind
            of `lightning_bayes.likelihood` with its settings: ``Gaussian(0.1)`` for known noise, ``Categorical(-1)`` for
            tokens ``[B, T, C]``, ``Categorical(weight=...)``, ``Bernoulli(pos_weight=...)``. Or a `Likelihood`, which tells
            how batches are read: other inputs, nested outputs, ignored targets.
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
        read: From a batch to the terms of its loss, as `Labels.terms` returns them; None reads it as `likelihood` tells.

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
    kinds = kinds_of(likelihood)
    read = read or reader(model, likelihood if isinstance(likelihood, Likelihood) else kinds[0])
    without_noise = [isinstance(kind, Gaussian) and kind.std is None for kind in kinds]
    chooses_noise = without_noise == [True]
    require_evaluation_mode(model)
    unit = [Gaussian(1.0) if is_chosen else kind for kind, is_chosen in zip(kinds, without_noise, strict=True)]
    names = chosen_names(model, subset, (Reading(read, b, unit) for b in on_device(loader, model)))
    with only_trained(model, names) as params:
        require_full_precision(params.values())
        if any(without_noise):
            kinds = _with_noise_of_residuals(model, loader, read, unit, without_noise)
        measured = _STRUCTURES[structure](model, params)
        fits = _measure(measured, loader, read, kinds, curvature, mc_samples, seed)
        for fit in fits if require_trained else ():
            fit.require_trained(type(model).__name__)
    evidence = Evidence(measured, together(fits), 2 if curvature == "empirical_fisher" else 1)
    groups = _prior_groups(params, prior_structure)
    fixed_delta = None if isinstance(prior_precision, str) else float(prior_precision)
    deltas, std = maximise(evidence, groups, 1.0, fixed_delta, chooses_noise)
    if validation is not None:
        delta, std = choose_by_validation(evidence, validation, read, kinds, std, chooses_noise)
        deltas = [delta]
    prior = {name: deltas[index] for name, index in groups.items()}
    log_marginal = log_evidence(evidence, prior, std)  # before the posterior, because both need much memory
    if len(kinds) == 1 and isinstance(kinds[0], Gaussian):
        kinds = (Gaussian((std * torch.tensor(kinds[0].std, dtype=torch.float64)).tolist()),)
    searched = RANGE if validation is None else VALIDATION_RANGE
    at_edge = () if fixed_delta is not None else _warned_of_edges(prior, searched)
    known = with_kinds(likelihood if isinstance(likelihood, Likelihood) else None, kinds)
    posterior = evidence.posterior(prior, std).with_likelihood(known)
    return Laplace(posterior, kinds, log_marginal, prior, at_edge)


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


def kinds_of(likelihood: LaplaceLikelihood) -> tuple[OutputLikelihood, ...]:
    """The kind of each scored output; a `HyperparameterError` for a name or a value that has no curvature."""
    if isinstance(likelihood, Likelihood):
        kinds = tuple(scored.kind for scored in likelihood.outputs)
    else:
        kinds = (find_kind(likelihood, "likelihood"),)
    unknown = [kind for kind in kinds if isinstance(kind, Raw)]
    if unknown or not kinds:
        why = f": {unknown[0].why}" if unknown and unknown[0].why else ""
        raise HyperparameterError(
            f"The likelihood of the targets is not known{why}. Pass likelihood='classification', 'binary', 'multilabel', "
            "'regression' or 'counts'."
        )
    return kinds


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


def chosen_names(model: nn.Module, subset: str, readings: Iterable[Reading]) -> list[str]:
    """Names of the parameters of a subset; ``"last_layer"`` runs the first of the forward passes."""
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    if subset == "all":
        selected = names
    elif subset == "last_layer":
        reading = next(iter(readings))
        layers = {last_called(model, reading)}
        if len(reading.terms) > 1:  # each output has a last layer
            layers = layers_before_outputs(model, reading)
        selected = [name for name in names if name.startswith(tuple(f"{layer}." if layer else "" for layer in layers))]
    else:
        selected = [name for name in names if re.search(subset, name)]
    if not selected:
        raise UnsupportedLayerError(
            f"subset={subset!r} matches no parameter that requires gradients; {type(model).__name__} has "
            f"{name_some(names) or 'none'}. Pass subset='last_layer', subset='all', or a regular expression for these names."
        )
    return selected


def _with_noise_of_residuals(
    model: nn.Module,
    loader: Iterable[Any],
    read: Reader,
    unit: Sequence[OutputLikelihood],
    without_noise: Sequence[bool],
) -> tuple[OutputLikelihood, ...]:
    """The kinds with one σ₁ for each number of an output without noise, from the residuals; 1 for a single number."""
    fits = [TrainingFit(kind) for kind in unit]
    for batch in on_device(loader, model):
        reading = Reading(read, batch, unit)
        if reading()[0].numel() == 1:  # whose noise the evidence alone chooses
            return tuple(unit)
        for fit, term in zip(fits, reading.terms, strict=True):
            fit.update(term)
    pairs = zip(fits, without_noise, strict=True)
    return tuple(Gaussian(fit.noise_std().tolist()) if is_chosen else fit.kind for fit, is_chosen in pairs)


def _measure(
    measured: AbstractStructure,
    loader: Iterable[Any],
    read: Reader,
    kinds: Sequence[OutputLikelihood],
    curvature: CurvatureName,
    mc_samples: int,
    seed: int,
) -> list[TrainingFit]:
    """Measure the curvature and the fit of the training data in one pass."""
    fits, device = [TrainingFit(kind) for kind in kinds], next(measured.model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for batch in on_device(loader, measured.model):
        reading = Reading(read, batch, kinds)
        with torch.enable_grad():
            measured.measure(reading, reading.columns(curvature, mc_samples, generator))
        for fit, term in zip(fits, reading.terms, strict=True):
            fit.update(term)
    return fits
