"""Prior precision, and noise, by the NLL of the linearised prediction of validation data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.likelihood import Likelihood
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.posthoc.batches import labelled
from lightning_bayes.posthoc.settings import link_of
from lightning_bayes.predictive import predictive_nll
from lightning_bayes.predictive.closed_form import output_moments, probit
from lightning_bayes.predictive.line_search import minimise_over_logarithm

SMALLEST, LARGEST = 1e-4, 1e4  # of δ
_GRID, _TOLERANCE = 17, 0.05  # steps of a factor 3, and of the logarithm
_NOISE_RANGE = 10.0  # factor around the noise that the marginal likelihood chooses


class Built(Protocol):
    """A result, such as `Laplace`."""

    @property
    def posterior(self) -> AbstractPosterior:
        """The posterior."""


def choose_by_validation(
    model: nn.Module,
    build: Callable[[list[float], float], Built],
    validation: Iterable[Any],
    likelihood: Likelihood,
    start: tuple[list[float], float],
    chooses_noise: bool,
) -> tuple[list[float], float]:
    """The prior precision of the lowest NLL; noise and prior precision in turns where both are chosen.

    Args:
        model: The network.
        build: Makes the posterior of a prior precision and a noise.
        validation: Data in pairs.
        likelihood: The likelihood of the targets.
        start: The prior precision and the noise of the highest marginal likelihood.
        chooses_noise: Whether the noise is chosen.

    Returns:
        δ, alone in its list, and σ.
    """
    batches = list(labelled(validation, next(model.parameters()).device))

    def nll(delta: float, std: float) -> float:
        posterior = build([delta], std).posterior
        return sum(_nll(model, posterior, x, y, likelihood, std) * len(y) for x, y in batches)

    (_,), std = start
    delta = minimise_over_logarithm(partial(nll, std=std), SMALLEST, LARGEST, _GRID, _TOLERANCE)
    if chooses_noise:
        low, high = std / _NOISE_RANGE, std * _NOISE_RANGE
        std = minimise_over_logarithm(lambda value: nll(delta, value), low, high, _GRID, _TOLERANCE)
        delta = minimise_over_logarithm(partial(nll, std=std), SMALLEST, LARGEST, _GRID, _TOLERANCE)
    return [delta], std


def _nll(
    model: nn.Module, posterior: AbstractPosterior, inputs: Any, targets: Tensor, likelihood: Likelihood, std: float
) -> float:
    outputs, variance = output_moments(model, posterior, lambda: model(inputs))
    link = link_of(likelihood)
    if link == "identity":
        total = variance + std**2
        scaled = (targets.reshape(outputs.shape) - outputs) / total.sqrt()
        return predictive_nll(torch.zeros_like(scaled)[None], scaled, link, 1.0) + float(total.log().mean()) / 2
    return predictive_nll(probit(outputs, variance)[None], targets, link)
