"""Choose prior precision and noise by the NLL of the linearised prediction on validation data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributions import Normal

from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.curvature.likelihood import Gaussian, Likelihood, Poisson
from lightning_bayes.likelihood.line_search import minimise_over_logarithm
from lightning_bayes.posthoc.batches import labelled
from lightning_bayes.posthoc.evidence import Evidence
from lightning_bayes.predictive.closed_form import BatchMoments, Room, probit, spread_points
from lightning_bayes.predictive.densities import nll_sum_of, poisson_log_density
from lightning_bayes.predictive.repeated import Repeatable

RANGE = (1e-4, 1e4)  # bounds of δ
STORED_ELEMENTS = 2**26  # of derivatives, 256 MiB of float32; the others are computed again for each δ
_GRID = 17  # grid points, a factor of 3 apart
_TOLERANCE = 0.05  # of the logarithm
_POINTS = 32  # that represent a Gaussian log-rate
_NOISE_RANGE = 10.0  # largest factor between the chosen and the initial σ


def choose_by_validation(
    evidence: Evidence, validation: Iterable[Any], likelihood: Likelihood, std: float, chooses_noise: bool
) -> tuple[float, float]:
    """Choose the prior precision with the lowest NLL. If requested, choose the noise too, then the precision again."""
    model, params = evidence.structure.model, evidence.structure.params
    engine, room = FusedEngine(model, "sum"), Room(STORED_ELEMENTS)
    pairs = labelled(validation, next(model.parameters()).device)
    batches = [(BatchMoments(engine, Repeatable(model, x), room), y) for x, y in pairs]

    def nll(delta: float, std: float) -> float:
        posterior = evidence.posterior(dict.fromkeys(params, delta), std)
        return sum(_nll(*batch.under(posterior), y, likelihood, std) for batch, y in batches)

    def best_delta(std: float) -> float:
        return minimise_over_logarithm(partial(nll, std=std), *RANGE, _GRID, _TOLERANCE)

    delta = best_delta(std)
    if chooses_noise:
        std = minimise_over_logarithm(partial(nll, delta), std / _NOISE_RANGE, std * _NOISE_RANGE, _GRID, _TOLERANCE)
        delta = best_delta(std)
    return delta, std


def _nll(outputs: Tensor, variance: Tensor, targets: Tensor, likelihood: Likelihood, std: float) -> float:
    """-log p(y | x), summed over examples."""
    if isinstance(likelihood, Gaussian):
        predictive = Normal(outputs.double(), (variance.double() + std**2).sqrt(), validate_args=False)
        return -float(predictive.log_prob(targets.reshape(outputs.shape)).sum())  # type: ignore[no-untyped-call]
    if isinstance(likelihood, Poisson):
        draws = outputs + spread_points(_POINTS).to(outputs).view(-1, *[1] * outputs.dim()) * variance.sqrt()
        return float(nll_sum_of(poisson_log_density, draws, targets.reshape(outputs.shape)))
    wide_targets = targets.double() if targets.is_floating_point() else targets
    return float(likelihood.nll(probit(outputs, variance).double(), wide_targets).sum())
