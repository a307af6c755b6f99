"""Choose prior precision and noise by the NLL of the linearised prediction on validation data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributions import Normal

from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.likelihood import Bernoulli, Categorical, Gaussian, OutputLikelihood
from lightning_bayes.likelihood.line_search import minimise_over_logarithm
from lightning_bayes.likelihood.scoring import target_nlls
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.posthoc.batches import Reader, Reading, Term, on_device
from lightning_bayes.posthoc.evidence import Evidence
from lightning_bayes.predictive.closed_form import BatchMoments, Room, probit, spread_points

RANGE = (1e-4, 1e4)  # bounds of δ
STORED_ELEMENTS = 2**26  # of derivatives, 256 MiB of float32; the others are computed again for each δ
_GRID = 17  # grid points, a factor of 3 apart
_TOLERANCE = 0.05  # of the logarithm
_POINTS = 32  # that represent the Gaussian of an output
_NOISE_RANGE = 10.0  # largest factor between the chosen and the initial σ


def choose_by_validation(
    evidence: Evidence,
    validation: Iterable[Any],
    read: Reader,
    kinds: Sequence[OutputLikelihood],
    std: float,
    chooses_noise: bool,
) -> tuple[float, float]:
    """Choose the prior precision with the lowest NLL. If requested, choose the noise too, then the precision again."""
    model, params = evidence.structure.model, evidence.structure.params
    engine, room = FusedEngine(model, "sum"), Room(STORED_ELEMENTS)
    readings = [Reading(read, batch, kinds) for batch in on_device(validation, model)]
    batches = [(BatchMoments(engine, reading, room), reading) for reading in readings]

    def nll(delta: float, std: float) -> float:
        posterior = evidence.posterior(dict.fromkeys(params, delta), std)
        return sum(_nll(moments, reading, posterior, std) for moments, reading in batches)

    def best_delta(std: float) -> float:
        return minimise_over_logarithm(partial(nll, std=std), *RANGE, _GRID, _TOLERANCE)

    delta = best_delta(std)
    if chooses_noise:
        std = minimise_over_logarithm(partial(nll, delta), std / _NOISE_RANGE, std * _NOISE_RANGE, _GRID, _TOLERANCE)
        delta = best_delta(std)
    return delta, std


def _nll(moments: BatchMoments, reading: Reading, posterior: AbstractPosterior, std: float) -> float:
    """-log p(y | x) of a batch, summed over the terms of its loss."""
    outputs, variances = map(reading.split, moments.under(posterior))
    return sum(_nll_of(*each, std) for each in zip(outputs, variances, reading.terms, strict=True))


def _nll_of(outputs: Tensor, variance: Tensor, term: Term, std: float) -> float:
    """-log p(y | x), summed over the targets that count."""
    kind = term.kind
    if isinstance(kind, Gaussian):
        noise = outputs.new_tensor(kind.std).double() * std
        predictive = Normal(outputs.double(), (variance.double() + noise**2).sqrt(), validate_args=False)
        values: Tensor = predictive.log_prob(term.targets)  # type: ignore[no-untyped-call]
        return -float(values.where(term.mask, 0.0).sum())
    if isinstance(kind, (Categorical, Bernoulli)):
        log_prob = kind.log_prob(probit(outputs, variance).double(), term.targets)
        return -float(log_prob.where(term.mask, 0.0).sum())
    points = spread_points(_POINTS).to(outputs).view(-1, *[1] * outputs.dim())
    return float(target_nlls(kind, outputs + points * variance.sqrt(), term.targets, term.mask).sum())
