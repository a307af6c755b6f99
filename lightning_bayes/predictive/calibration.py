"""Choose the width c of a posterior and one temperature T on validation data.

    p(y | x) = (1/S) Σ_s p(y | f(x, μ + c (θ_s - μ)) / T)

The candidates are (1, 1), (1, T), (c, 1) and (c, T), each with its lowest validation NLL. A candidate replaces a simpler one
if its NLL is lower by one standard error of the paired difference and by .001 nats, so what the data do not determine stays
as it is, and the uncertainty of a prediction is not given up for nothing.

For classes, the data have half an example more, whose class is drawn by chance: without it, data that a network classifies
without an error would ask for infinite confidence. With a whole one, a hundred examples gave underconfident predictions.
The search over c costs few evaluations: factors of 4 from c = 1 while the NLL falls, then a factor of 2, and c = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.errors import DataError, NonFiniteError
from lightning_bayes.likelihood import LinkArgument
from lightning_bayes.likelihood.line_search import minimise_over_logarithm
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive.closed_form import Linearized, predictive_samples
from lightning_bayes.predictive.densities import (
    BLOCK,
    Reduce,
    fit_noise_std,
    gaussian_log_density,
    poisson_log_density,
    shaped_like_sample,
)
from lightning_bayes.predictive.known_outputs import called, known_outputs, the_output
from lightning_bayes.predictive.labelled import LabelledBatches
from lightning_bayes.predictive.links import Link, combine, link_of_kind
from lightning_bayes.predictive.recalibration import recalibrate
from lightning_bayes.predictive.samples import PosteriorSamples, at_posterior_mean
from lightning_bayes.predictive.temperature import LARGEST, SMALLEST

Choice: TypeAlias = Literal["neither", "temperature", "width", "both"]
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-5, 2.0**6  # bounds of c > 0; smaller widths predict like the mean
EVALUATIONS = 8  # of S samples each, about what a search over c costs
CLASS_LINKS = ("softmax", "softmax_last", "sigmoid")  # whose outputs are logits, which a temperature can divide
_GRID, _TOLERANCE = 13, 1e-3  # of log T
_SMALLEST_GAIN = 1e-3  # nats
_BY_CHANCE = 0.5  # weight of the additional example


class Calibration(NamedTuple):
    """The chosen width and temperature."""

    choice: Choice
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
    losses: Tensor  # of each example, with its share of the additional one
    risk: float  # their mean
    nll: float  # without the additional example
    noise_std: float | None = None


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
    """Choose the width of a posterior and a temperature on validation data: one of them, both or neither.

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
        The posterior with its width and temperature, and how they were chosen.

    Raises:
        DataError: If the loader yields no batch.

    Example:
        >>> from lightning_bayes.posteriors import MeanField
        >>> model, x = nn.Linear(1, 2, bias=False), torch.ones(40, 1)
        >>> mean = {"weight": torch.tensor([[8.0], [0.0]])}
        >>> q = MeanField(mean, {"weight": torch.full((2, 1), 1e4)}, {"weight": 1.0}, num_data=40)
        >>> labels = (torch.arange(40) % 4 == 0).long()  # three of four have class 0
        >>> found = calibrate(model, q, [(x, labels)], samples=4, link="classification")
        >>> found.calibration.choice, round(found.posterior.temperature, 1)
        ('temperature', 7.4)
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
    errors: float = 1.0,
) -> Calibration:
    """Choose among the width of a posterior, a temperature, both and neither.

    Args:
        outputs_at: Outputs of the validation examples at a width c ≥ 0, ``[S, B, …]``, with the same noise at every width.
        targets: Their targets, ``[B, …]``.
        link: How outputs become predictions.
        noise_std: σ of the identity link; None fits it at each width.
        reduce: Sums a tensor over processes that each hold some of the examples. All processes choose the same.
        width: Whether to try other widths than 1.
        errors: Standard errors of the paired difference by which a change has to lower the NLL.

    Returns:
        The choice.

    Raises:
        NonFiniteError: If the NLL at c = 1 is not finite.

    Example:
        >>> outputs, targets = torch.tensor([[[4.0, 0.0]] * 40]), (torch.arange(40) % 4 == 0).long()
        >>> found = choose_calibration(lambda scale: outputs, targets, "softmax")
        >>> found.choice, round(found.temperature, 2)
        ('temperature', 3.7)
    """
    measured = partial(_candidate, targets, link, noise_std, reduce)

    @cache
    def at(scale: float) -> tuple[_Candidate, _Candidate]:
        outputs = outputs_at(scale)
        plain = measured(outputs, scale, 1.0)
        if link not in CLASS_LINKS:
            return plain, plain
        # one evaluation of the network serves all temperatures
        best = minimise_over_logarithm(lambda t: measured(outputs, scale, t).risk, SMALLEST, LARGEST, _GRID, _TOLERANCE)
        return plain, measured(outputs, scale, best)

    before = at(1.0)[0]
    if not math.isfinite(before.risk):
        raise NonFiniteError(
            "The NLL of the posterior is not finite on the validation data, because its outputs are not."
        )
    candidates = [at(1.0)[1]]
    if width:
        scaled, both = (at(_lowest(lambda c, kind=kind: at(c)[kind].risk))[kind] for kind in (0, 1))  # type: ignore[misc]
        candidates = [*sorted([*candidates, scaled], key=lambda each: each.risk), both]
    chosen = before
    for candidate in candidates:
        difference, error = _paired(candidate, chosen, reduce)
        if difference < -max(errors * error, _SMALLEST_GAIN):
            chosen = candidate
    choice: Choice = ("neither", "temperature", "width", "both")[(chosen.temperature != 1) + 2 * (chosen.scale != 1)]
    error = _paired(chosen, before, reduce)[1]
    return Calibration(choice, chosen.scale, chosen.temperature, chosen.nll, before.nll, error, chosen.noise_std)


def _lowest(nll: Callable[[float], float]) -> float:
    """The width with the lowest NLL of those that the search tries."""
    best = 1.0
    for factor in (4.0, 0.25):
        while SMALLEST_SCALE <= best * factor <= LARGEST_SCALE and nll(best * factor) < nll(best):
            best *= factor
    return min((best, 2 * best, best / 2, 0.0), key=nll)


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
    parts = [_losses(part.double() / temperature, y, link, noise_std) for part, y in blocks]
    losses, chance = (torch.cat(part) for part in zip(*parts, strict=True))
    sums = torch.stack([losses.sum(), chance.sum(), torch.tensor(float(len(losses)))])
    total, of_chance, count = (float(value) for value in reduce(sums))
    risk = total / count + _BY_CHANCE * of_chance / count**2
    risk = math.inf if math.isnan(risk) else risk
    return _Candidate(scale, temperature, losses + _BY_CHANCE * chance / count, risk, total / count, noise_std)


def _losses(outputs: Tensor, targets: Tensor, link: Link, noise_std: float | None) -> tuple[Tensor, Tensor]:
    """NLL of each example, averaged over its targets: for its target, and for a class by chance."""
    if link in {"identity", "exp"}:
        of_gaussian = None if noise_std is None else partial(gaussian_log_density, std=noise_std)
        log_density = of_gaussian or poisson_log_density
        losses = math.log(len(outputs)) - log_density(outputs, targets).logsumexp(0)
        chance = torch.zeros_like(losses)
    elif link == "softmax":
        log_probs = combine(outputs, link)
        labels = targets.double() if targets.is_floating_point() else targets.long()
        losses, chance = F.cross_entropy(log_probs, labels, reduction="none"), -log_probs.mean(1)
    else:
        logits = combine(outputs, link)
        losses = F.binary_cross_entropy_with_logits(logits, targets.double(), reduction="none")
        chance = F.softplus(logits) - logits / 2
    return losses.reshape(len(losses), -1).mean(1), chance.reshape(len(losses), -1).mean(1)


def _paired(one: _Candidate, other: _Candidate, reduce: Reduce) -> tuple[float, float]:
    """Mean and standard error of the difference of losses over examples."""
    difference = one.losses - other.losses
    sums = torch.stack([difference.sum(), difference.square().sum(), torch.tensor(float(len(difference)))])
    total, squares, count = (float(value) for value in reduce(sums))
    mean = total / count
    return mean, math.sqrt(max(squares / count - mean**2, 0.0) / count)
