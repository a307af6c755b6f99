"""Choose the width c of a posterior and one temperature T on validation data, both shrunk towards 1.

    p(y | x) = (1/S) Σ_s p(y | f(x, μ + c (θ_s - μ)) / T)
    (c, T) = argmin  - Σ_i log p(y_i | x_i) + (log T)² / 2σ_T² + (log c)² / 2σ_c²

The sum runs over the n validation examples, so both numbers stay near 1 on a few of them, and many overrule the shrinkage.
The NLL of these examples never rises. An example with several targets, such as tokens or pixels, counts as one: the NLL is
averaged over its targets, which depend on each other. σ_T and σ_c are chosen in docs/defaults.md.

The search over c costs few evaluations: factors of 2 from c = 1 while the sum falls, then a factor of √2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.errors import DataError, NonFiniteError
from lightning_bayes.likelihood import LinkArgument
from lightning_bayes.likelihood.line_search import minimise_over_logarithm
from lightning_bayes.likelihood.scoring import fit_noise_std
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive.closed_form import Linearized, predictive_samples
from lightning_bayes.predictive.densities import (
    BLOCK,
    Reduce,
    gaussian_log_density,
    poisson_log_density,
    shaped_like_sample,
)
from lightning_bayes.predictive.known_outputs import called, known_outputs, the_output
from lightning_bayes.predictive.labelled import LabelledBatches
from lightning_bayes.predictive.links import Link, combine, link_of_kind
from lightning_bayes.predictive.recalibration import recalibrate
from lightning_bayes.predictive.samples import PosteriorSamples, at_posterior_mean
from lightning_bayes.predictive.temperature import LARGEST, SHRINKAGE, SMALLEST, penalty

WIDTH_SHRINKAGE: Final = 1.0  # σ_c, standard deviation of log c
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-5, 2.0**6  # bounds of c; smaller widths predict like the mean
EVALUATIONS = 8  # of S samples each, about what a search over c costs
CLASS_LINKS = ("softmax", "softmax_last", "sigmoid")  # whose outputs are logits, which a temperature can divide
_GRID, _TOLERANCE = 13, 1e-3  # of log T


class Calibration(NamedTuple):
    """The chosen width and temperature."""

    scale: float  # c
    temperature: float  # T
    nll: float  # at c and T, in nats per target
    nll_before: float  # at c = 1 and T = 1
    standard_error: float  # of nll - nll_before, over examples
    noise_std: float | None  # σ of the identity link at c: as passed, or fitted; None for other links


class Calibrated(NamedTuple):
    """A calibrated posterior; `mc_predict`, `export` and `save_posterior` apply its width and its temperature."""

    posterior: ScaledPosterior
    calibration: Calibration


class _Candidate(NamedTuple):
    scale: float
    temperature: float
    losses: Tensor  # the NLL of each example
    nll: float  # their mean
    objective: float  # their sum, with the shrinkage
    noise_std: float | None


@torch.no_grad()
def calibrate(
    model: nn.Module,
    posterior: AbstractPosterior,
    loader: Iterable[Any],
    samples: int = 32,
    *,
    link: LinkArgument | None = None,
    seed: int = 0,
    noise_std: float | None = None,
    linearized: Linearized = False,
    recalibrate_on: Sequence[Any] = (),
    max_batches: int | None = None,
) -> Calibrated:
    """Choose the width of a posterior and a temperature on validation data; both stay near 1 on a few examples.

    Args:
        model: The trained architecture, called with the inputs of a batch. Its own weights are not used.
        posterior: The posterior, from `load_posterior` or an optimizer's `posterior()`.
        loader: Batches ``(inputs, targets)`` of data that training has not seen, or batches as in the fit.
        samples: S, at least 1.
        link: As in `mc_predict`. With ``"identity"`` and ``"exp"`` only the width is chosen; with ``"identity"``, with the
            noise that fits best at each width.
        seed: Seed of the weight samples.
        noise_std: σ of the identity link; None fits it together with the width.
        linearized: The predictive, as in `mc_predict`.
        recalibrate_on: Batches of training inputs for BatchNorm statistics of each sample, as in `mc_predict`.
        max_batches: Validation batches to use; None uses all.

    Returns:
        The posterior with its width and temperature, and the NLL before and after.

    Raises:
        DataError: If the loader yields no batch.

    Example:
        >>> from lightning_bayes.posteriors import MeanField
        >>> model, x = nn.Linear(1, 2, bias=False), torch.ones(40, 1)
        >>> mean = {"weight": torch.tensor([[8.0], [0.0]])}
        >>> q = MeanField(mean, {"weight": torch.full((2, 1), 1e4)}, {"weight": 1.0}, num_data=40)
        >>> labels = (torch.arange(40) % 4 == 0).long()  # three of four have class 0
        >>> found = calibrate(model, q, [(x, labels)], samples=4, link="classification")
        >>> found.posterior.scale, round(found.posterior.temperature, 1)
        (1.0, 2.7)
    """
    device, known = next(model.parameters()).device, known_outputs(posterior, link, stacklevel=4)
    drawn = PosteriorSamples(posterior.to(device), samples, seed)
    draws: Any = predictive_samples(drawn, linearized, link_of_kind(the_output(known).kind))
    batches = list(islice(loader, max_batches))
    if not batches:
        raise DataError(
            "calibrate needs validation data, but the loader yields no batch. Hold out some training examples."
        )
    runs = [called(model, known, inputs) for inputs in recalibrate_on]
    with at_posterior_mean(model, posterior):
        labelled = LabelledBatches(model, known, batches)

        def outputs_at(scale: float) -> Tensor:
            scaled = draws.scaled(scale)
            if runs:
                scaled = recalibrate(model, scaled, runs, of="mean" if linearized else "sample")
            return labelled.outputs(scaled)

        chosen = choose_calibration(outputs_at, labelled.targets(), labelled.link, noise_std)
    return Calibrated(ScaledPosterior(posterior, chosen.scale, bool(linearized), chosen.temperature), chosen)


def choose_calibration(
    outputs_at: Callable[[float], Tensor],
    targets: Tensor,
    link: Link,
    noise_std: float | None = None,
    reduce: Reduce = lambda total: total,
    width: bool = True,
) -> Calibration:
    """Choose the width of a posterior and, for logits, a temperature.

    Args:
        outputs_at: Outputs of the validation examples at a width c > 0, ``[S, B, …]``, with the same noise at every width.
        targets: Their targets, ``[B, …]``.
        link: How outputs become predictions.
        noise_std: σ of the identity link; None fits it at each width.
        reduce: Sums a tensor over processes that each hold some of the examples. All processes choose the same.
        width: Whether to try other widths than 1.

    Returns:
        The choice.

    Raises:
        NonFiniteError: If the NLL at c = 1 is not finite.

    Example:
        >>> outputs, targets = torch.tensor([[[4.0, 0.0]] * 40]), (torch.arange(40) % 4 == 0).long()
        >>> found = choose_calibration(lambda scale: outputs, targets, "softmax")
        >>> found.scale, round(found.temperature, 2)
        (1.0, 1.76)
    """
    measured = partial(_candidate, targets, link, noise_std, reduce)

    @cache
    def at(scale: float) -> tuple[_Candidate, _Candidate]:
        outputs = outputs_at(scale)
        plain = measured(outputs, scale, 1.0)
        if link not in CLASS_LINKS:
            return plain, plain

        def objective(temperature: float) -> float:  # one evaluation of the network serves all temperatures
            return measured(outputs, scale, temperature).objective

        best = minimise_over_logarithm(objective, SMALLEST, LARGEST, _GRID, _TOLERANCE)
        return plain, min(plain, measured(outputs, scale, best), key=lambda each: each.objective)

    before = at(1.0)[0]
    if not math.isfinite(before.objective):
        raise NonFiniteError(
            "The NLL of the posterior is not finite on the validation data, because its outputs are not."
        )
    chosen = at(_lowest(lambda scale: at(scale)[1].objective) if width else 1.0)[1]
    error = _standard_error(chosen.losses - before.losses, reduce)
    return Calibration(chosen.scale, chosen.temperature, chosen.nll, before.nll, error, chosen.noise_std)


def _lowest(objective: Callable[[float], float]) -> float:
    """The width with the lowest objective of those that the search tries."""
    best = 1.0
    for factor in (2.0, 0.5):
        while SMALLEST_SCALE <= best * factor <= LARGEST_SCALE and objective(best * factor) < objective(best):
            best *= factor
    return min((best, best * math.sqrt(2), best / math.sqrt(2)), key=objective)


def _candidate(
    targets: Tensor,
    link: Link,
    noise_std: float | None,
    reduce: Reduce,
    outputs: Tensor,
    scale: float,
    temperature: float,
) -> _Candidate:
    """The candidate of outputs ``[S, B, …]`` at a width and a temperature."""
    if link == "softmax_last":
        outputs, link = outputs.movedim(-1, 2), "softmax"
    if link != "softmax":
        targets = shaped_like_sample(targets, outputs)
    if link == "identity" and noise_std is None:
        noise_std = fit_noise_std(outputs, targets, reduce)
    size = max(1, BLOCK // max(1, outputs[:, :1].numel()))
    blocks = zip(outputs.split(size, 1), targets.split(size), strict=True)  # type: ignore[no-untyped-call]
    losses = torch.cat([_losses(part.double() / temperature, y, link, noise_std) for part, y in blocks])
    total, count = (float(value) for value in reduce(torch.stack([losses.sum(), torch.tensor(float(len(losses)))])))
    objective = total + penalty(temperature, SHRINKAGE) + penalty(scale, WIDTH_SHRINKAGE)
    objective = math.inf if math.isnan(objective) else objective
    return _Candidate(scale, temperature, losses, total / count, objective, noise_std)


def _losses(outputs: Tensor, targets: Tensor, link: Link, noise_std: float | None) -> Tensor:
    """NLL of each example, averaged over its targets."""
    if link in {"identity", "exp"}:
        of_gaussian = None if noise_std is None else partial(gaussian_log_density, std=noise_std)
        log_density = of_gaussian or poisson_log_density
        losses = math.log(len(outputs)) - log_density(outputs, targets).logsumexp(0)
    elif link == "softmax":
        labels = targets.double() if targets.is_floating_point() else targets.long()
        losses = F.cross_entropy(combine(outputs, link), labels, reduction="none")
    else:
        losses = F.binary_cross_entropy_with_logits(combine(outputs, link), targets.double(), reduction="none")
    return losses.reshape(len(losses), -1).mean(1)


def _standard_error(differences: Tensor, reduce: Reduce) -> float:
    """The standard error of a mean over examples."""
    sums = torch.stack([differences.sum(), differences.square().sum(), torch.tensor(float(len(differences)))])
    total, squares, count = (float(value) for value in reduce(sums))
    return math.sqrt(max(squares / count - (total / count) ** 2, 0.0) / count)
