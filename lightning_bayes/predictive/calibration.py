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
from torch import Tensor, nn

from lightning_bayes.errors import DataError, NonFiniteError
from lightning_bayes.likelihood import Gaussian, LinkArgument, OutputLikelihood, Raw, find_kind
from lightning_bayes.likelihood.batches import is_pair, labels_in, labels_of_pair
from lightning_bayes.likelihood.line_search import minimise_over_logarithm
from lightning_bayes.likelihood.scoring import Reduce, shaped_mask, target_nlls, with_noise
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive.closed_form import Linearized, predictive_samples
from lightning_bayes.predictive.known_outputs import called, known_outputs, the_output
from lightning_bayes.predictive.labelled import LabelledBatches
from lightning_bayes.predictive.recalibration import recalibrate
from lightning_bayes.predictive.samples import PosteriorSamples, at_posterior_mean
from lightning_bayes.predictive.temperature import LARGEST, SHRINKAGE, SMALLEST, penalty

WIDTH_SHRINKAGE: Final = 0.5  # σ_c, standard deviation of log c
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-5, 2.0**6  # bounds of c; smaller widths predict like the mean
EVALUATIONS = 8  # of S samples each, about what a search over c costs
_GRID, _TOLERANCE = 13, 1e-3  # of log T


class Calibration(NamedTuple):
    """The chosen width and temperature."""

    scale: float  # c
    temperature: float  # T
    nll: float  # at c and T, in nats per target
    nll_before: float  # at c = 1 and T = 1
    standard_error: float  # of nll - nll_before, over examples
    noise_std: Any  # σ of a Gaussian at c: as passed, or fitted; None for other likelihoods


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
    noise_std: Any


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
        link: As in `mc_predict`. Outputs that are no logits get a width only; regressions without known noise, with the
            noise that fits best at each width.
        seed: Seed of the weight samples.
        noise_std: σ of a regression; None takes the one that the likelihood states, else fits it together with the width.
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
    kind = the_output(known).kind
    drawn = PosteriorSamples(posterior.to(device), samples, seed)
    draws: Any = predictive_samples(drawn, linearized, kind)
    batches = list(islice(loader, max_batches))
    if not batches:
        raise DataError(
            "calibrate needs validation data, but the loader yields no batch. Hold out some training examples."
        )
    runs = [called(model, known, inputs) for inputs in recalibrate_on]
    with at_posterior_mean(model, posterior):
        labelled = LabelledBatches(
            model,
            known,
            [
                labels_of_pair(model.forward, batch, known) if is_pair(batch) else labels_in(batch, known)
                for batch in batches
            ],
        )

        def outputs_at(scale: float) -> Tensor:
            scaled = draws.scaled(scale)
            if runs:
                scaled = recalibrate(model, scaled, runs, of="mean" if linearized else "sample")
            return labelled.outputs(scaled)

        outputs_at(1.0)  # which lays out the targets
        stated = kind if noise_std is None else Gaussian(noise_std).completed(kind)
        chosen = choose_calibration(outputs_at, labelled.targets, stated, counted=labelled.counted)
    return Calibrated(ScaledPosterior(posterior, chosen.scale, bool(linearized), chosen.temperature), chosen)


def choose_calibration(
    outputs_at: Callable[[float], Tensor],
    targets: Tensor,
    likelihood: LinkArgument,
    *,
    counted: Tensor | None = None,
    reduce: Reduce = lambda total: total,
    width: bool = True,
) -> Calibration:
    """Choose the width of a posterior and, for logits, a temperature.

    Args:
        outputs_at: Outputs of the validation examples at a width c > 0, ``[S, B, …]``, with the same noise at every width.
        targets: Their targets, ``[B, …]``.
        likelihood: The kind of the outputs or its name, as in `mc_predict`. A `Gaussian` without σ, and outputs of which
            nothing is known, get the best σ at each width.
        counted: Mask of the targets that count, in their shape; None for all.
        reduce: Sums a tensor over processes that each hold some of the examples. All processes choose the same.
        width: Whether to try other widths than 1.

    Returns:
        The choice.

    Raises:
        NonFiniteError: If the NLL at c = 1 is not finite.

    Example:
        >>> outputs, targets = torch.tensor([[[4.0, 0.0]] * 40]), (torch.arange(40) % 4 == 0).long()
        >>> found = choose_calibration(lambda scale: outputs, targets, "classification")
        >>> found.scale, round(found.temperature, 2)
        (1.0, 1.76)
    """
    stated = find_kind(likelihood)
    kind = Gaussian() if isinstance(stated, Raw) else stated
    measured = partial(_candidate, kind, targets, counted, reduce)

    @cache
    def at(scale: float) -> tuple[_Candidate, _Candidate]:
        outputs = outputs_at(scale)
        plain = measured(outputs, scale, 1.0)
        if not kind.has_temperature:
            return plain, plain

        def objective(temperature: float) -> float:  # one evaluation of the network serves all temperatures
            return measured(outputs, scale, temperature).objective

        best = minimise_over_logarithm(objective, SMALLEST, LARGEST, _GRID, _TOLERANCE)
        return plain, min(plain, measured(outputs, scale, best), key=lambda each: each.objective)

    before = at(1.0)[0]
    if not math.isfinite(before.objective):
        raise NonFiniteError(
            "The NLL of the posterior is not finite on the validation data: its outputs are not finite, or "
            f"{kind!r} has no density."
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
    kind: OutputLikelihood,
    targets: Tensor,
    counted: Tensor | None,
    reduce: Reduce,
    outputs: Tensor,
    scale: float,
    temperature: float,
) -> _Candidate:
    """The candidate of outputs ``[S, B, …]`` at a width and a temperature."""
    targets = targets.reshape(kind.target_shape(outputs[0], targets))
    noisy = with_noise(kind, outputs, targets, reduce, counted)
    losses = torch.full((1,), math.nan, dtype=torch.float64)
    if noisy is not None:
        losses = _example_nlls(noisy, outputs, targets, counted, temperature)
    total, count = reduce(torch.stack([losses.sum(), losses.new_tensor(float(len(losses)))])).tolist()
    if count == 0:
        raise DataError("No target of the validation data counts: all are ignored or missing.")
    objective = total + penalty(temperature, SHRINKAGE) + penalty(scale, WIDTH_SHRINKAGE)
    objective = math.inf if math.isnan(objective) else objective
    return _Candidate(scale, temperature, losses, total / count, objective, getattr(noisy, "std", None))


def _example_nlls(
    kind: OutputLikelihood, outputs: Tensor, targets: Tensor, counted: Tensor | None, temperature: float
) -> Tensor:
    """The NLL of each example, averaged over its targets that count; examples without one are left out."""
    nlls = target_nlls(kind, outputs, targets, counted, temperature)
    if counted is None:
        return nlls.flatten(1).mean(1) if nlls.dim() > 1 else nlls
    numbers = shaped_mask(kind, counted, nlls).reshape(len(nlls), -1).sum(1)
    return nlls.reshape(len(nlls), -1).sum(1)[numbers > 0] / numbers[numbers > 0]


def _standard_error(differences: Tensor, reduce: Reduce) -> float:
    """The standard error of a mean over examples."""
    sums = torch.stack([differences.sum(), differences.square().sum(), torch.tensor(float(len(differences)))])
    total, squares, count = (float(value) for value in reduce(sums))
    return math.sqrt(max(squares / count - (total / count) ** 2, 0.0) / count)
