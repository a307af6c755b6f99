"""What averaging over samples changes: scores of the average beside those of the mean, on the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_bayes.callbacks.evaluation.observed_metrics import distribution_of, targets_of
from lightning_bayes.callbacks.evaluation.sampled_forward import SampledCall, SampledForward
from lightning_bayes.likelihood import Likelihood, leaf_at
from lightning_bayes.likelihood.mixtures import grouped
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.metrics.paired import Paired, PairedClassification, PairedRegression
from lightning_bayes.metrics.regression import mixture_nll
from lightning_bayes.predictive import Link, Observation, Prediction, summarise
from lightning_bayes.predictive.links import CLASS_DIMS, predicted
from lightning_bayes.predictive.observations import log_densities

_WORDS: Final = {
    "cls/Acc": "accuracy",
    "cls/NLL": "NLL",
    "cal/ECE": "ECE",
    "reg/RMSE": "RMSE",
    "reg/NLL": "NLL",
}
SMALL_MUTUAL_INFORMATION: Final = 1e-3  # nats
_SHOWN: Final = 0.0001  # smallest difference that four digits show
_RETURNED: Final = ("outputs", "mean_outputs", "targets")  # by the zoo's tasks


class Comparison(NamedTuple):
    """The result of an evaluation."""

    scores: dict[str, Paired]  # of the average over samples, and of the mean, by metric key
    examples: int
    uncertainty: float  # mean mutual information in nats; for regression, mean variance over samples
    samples: int = 1  # S
    beside: str = "the mean"  # what the average is compared with

    def metrics(self) -> dict[str, float]:
        """The differences and their standard errors, as metrics of a test."""
        values: dict[str, float] = {}
        for key, paired in self.scores.items():
            values |= {f"test_diff/{key}": paired.first - paired.second, f"test_diff/{key}_SE": paired.error}
        return values

    def report(self, callback: str, samples: int) -> str:
        """A line for each score, and one in words."""
        width = max(map(len, _WORDS.values()))
        lines = [
            f"  {_WORDS[key]:{width}}  {paired.first:.4f} instead of {paired.second:.4f}, "
            f"{paired.first - paired.second:+.4f} ± {paired.error:.4f}"
            for key, paired in self.scores.items()
        ]
        predicted = f"the average over {samples} samples" if samples > 1 else "its prediction"
        return "\n".join(
            [
                f"{callback}: {predicted} instead of the mean, on {self.examples:,} test examples "
                "(± standard error of the difference):",
                *lines,
                f"  {self._verdict()}",
            ]
        )

    def _verdict(self) -> str:
        """Which scores are better and which are worse, of those that differ by more than their noise."""
        found: dict[bool, list[str]] = {True: [], False: []}
        for key, paired in self.scores.items():
            difference = paired.first - paired.second
            if paired.differs and abs(difference) >= _SHOWN:
                found[(difference > 0) == (key == "cls/Acc")].append(_WORDS[key])
        parts = [f"better in {' and '.join(found[True])}"] * bool(found[True])
        parts += [f"worse in {' and '.join(found[False])}"] * bool(found[False])
        if parts:
            return f"It is {', and '.join(parts)}, by more than two standard errors."
        return f"No score differs by two standard errors and {_SHOWN}."

    def summary(self) -> str:
        """A phrase for the end of a fit: scores with their differences and standard errors, and no verdict."""
        scores = ", ".join(
            f"{_WORDS[key]} {paired.first:.4f} ({paired.first - paired.second:+.4f} ± {paired.error:.4f})"
            for key, paired in self.scores.items()
        )
        spread = f"mutual information {self.uncertainty:.2g} nats"
        if not self.has_classes:
            spread = f"standard deviation over samples {math.sqrt(self.uncertainty):.2g}"
        return (
            f"the average over {self.samples} samples instead of {self.beside}, on {self.examples:,} validation examples (± "
            f"standard error of the difference): {scores}; {spread}"
        )

    @property
    def has_classes(self) -> bool:
        """Whether the outputs are probabilities."""
        return "cls/NLL" in self.scores

    @property
    def hardly_differs(self) -> bool:
        """Whether the samples of a classifier are nearly the same."""
        return self.has_classes and self.uncertainty < SMALL_MUTUAL_INFORMATION


class _Batch(NamedTuple):
    """The outputs and targets of a batch."""

    outputs: Tensor  # under each sample, [S, B, …]
    mean: Tensor  # at the mean, [B, …]
    targets: Tensor  # class indices, or values in the shape of the mean
    log_densities: tuple[Tensor, ...] = ()  # of the targets under the average and at the mean, [B]
    mask: Tensor | None = None  # of the targets that count


@final
class MeanComparison:
    """Collects the scores of both predictions over the batches of one evaluation.

    A step's result may hold ``outputs``, ``mean_outputs`` and ``targets``, as the zoo's tasks return. Otherwise the step has
    to call ``self(...)`` once, on a batch ``(inputs, targets)``; the mean then costs one more forward pass. Batches of
    another form are left out.
    """

    def __init__(
        self, forward: SampledForward, link: Link, observation: Observation | None, likelihood: Likelihood
    ) -> None:
        self._forward, self._observation, self._likelihood = forward, observation, likelihood
        self._link: Link = link if observation is None else "identity"
        has_classes = self._link in {*CLASS_DIMS, "sigmoid"}
        self._scores: PairedClassification | PairedRegression = (
            PairedClassification() if has_classes else PairedRegression()
        )
        self._uncertainty = torch.zeros(2, dtype=torch.float64)  # sums over examples of 1 and of the uncertainty

    def update(self, trainer: Trainer, returned: Any, batch: Any, call: SampledCall | None) -> None:
        """Add a batch, the result of its step and the step's only call of ``self(...)``."""
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            found = self._returned(returned) or (None if call is None else self._called(call, batch))
        if found is not None:
            self._add(found)

    def compute(self, reduce: Callable[[Tensor], Tensor]) -> Comparison | None:
        """The result, from the sums over processes; None without examples."""
        (count, uncertainty), scores = reduce(self._uncertainty).tolist(), self._scores.compute(reduce)
        samples = self._forward.samples.count
        return Comparison(scores, int(count), uncertainty / count, samples) if count else None

    def _returned(self, step: Any) -> _Batch | None:
        """What a step has returned; None if something is missing."""
        tensors = [step.get(name) for name in _RETURNED] if isinstance(step, dict) else []
        found = [value for value in tensors if isinstance(value, Tensor)]
        if len(found) < len(_RETURNED):
            return None
        outputs, mean, targets = found
        densities = [step[name] for name in ("log_densities", "mean_log_densities") if name in step]
        aligned = self._aligned(outputs, targets)
        both = (-mixture_nll(densities[0]), densities[1]) if len(densities) == 2 else ()
        return None if aligned is None else _Batch(outputs, mean, aligned, both)

    def _called(self, call: SampledCall, batch: Any) -> _Batch | None:
        """The outputs of a call, for targets that are known."""
        known = targets_of(self._likelihood, call.outputs, batch)
        if known is None:
            return None
        if self._observation is not None:
            return self._observed(self._observation, call, known.targets) if known.mask is None else None
        scored = self._likelihood.only
        assert scored is not None
        outputs, at_mean = leaf_at(call.outputs, scored.paths[0]), leaf_at(self._at_mean(call), scored.paths[0])
        aligned = self._aligned(outputs, known.targets) if isinstance(outputs, Tensor) else None
        return None if aligned is None else _Batch(outputs, at_mean, aligned, mask=known.mask)

    def _observed(self, observation: Observation, call: SampledCall, targets: Tensor) -> _Batch | None:
        """The means of the targets' distributions and the log-densities of the targets."""
        found, at_mean = distribution_of(observation, call.outputs), observation(self._at_mean(call))
        means = grouped(found[0].mean, found[1])
        aligned = self._aligned(means, targets)
        if aligned is None:
            return None
        densities = log_densities(*found, aligned.to(means.dtype))
        return _Batch(means, at_mean.mean, aligned, (-mixture_nll(densities), at_mean.log_prob(aligned)))

    def _at_mean(self, call: SampledCall) -> Any:
        """The output of a call at the mean, in at least single precision."""
        return mapped(
            lambda leaf: leaf.to(torch.promote_types(leaf.dtype, torch.float32)), self._forward.mean_output(call.call)
        )

    def _aligned(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Class indices, or targets in the shape of one sample's outputs; None if they are something else."""
        shape = outputs[0].movedim(1, -1).shape if self._link == "softmax" else outputs.shape[1:]
        if self._link in CLASS_DIMS:
            fits = targets.shape == shape[:-1] and _are_classes(targets, shape[-1])
        else:
            fits = targets.shape[:1] == shape[:1] and targets.numel() == shape.numel()
            fits = fits and (self._link != "sigmoid" or _are_classes(targets, 2))
        if not fits or not bool(outputs.isfinite().all()):
            return None
        return targets if self._link in CLASS_DIMS else targets.reshape(shape)

    def _add(self, batch: _Batch) -> None:
        both = [predicted(batch.outputs, self._link).mean(0), predicted(batch.mean[None], self._link)[0]]
        if isinstance(self._scores, PairedClassification):
            first, second = (class_last(probs, self._link) for probs in both)
            counts = slice(None) if batch.mask is None else batch.mask.reshape(batch.targets.shape)
            self._scores.update(first[counts], second[counts], batch.targets.long()[counts])
        elif batch.mask is not None:
            counts = batch.mask.reshape(batch.targets.shape)
            self._scores.update(both[0][counts], both[1][counts], batch.targets[counts])
        else:
            self._scores.update(*both, batch.targets, *batch.log_densities)
        uncertainty = uncertainty_of(batch.outputs, self._link).cpu().double()
        self._uncertainty += torch.stack([torch.ones_like(uncertainty), uncertainty]).sum(1)


def class_last(probs: Tensor, link: Link) -> Tensor:
    """Class probabilities ``[B, …, classes]``, of averaged predictions ``[B, …]`` of a link."""
    if link == "sigmoid":
        return torch.stack([1 - probs, probs], -1)
    return probs.movedim(1, -1) if link == "softmax" else probs


def uncertainty_of(outputs: Tensor, link: Link) -> Tensor:
    """Mutual information or variance of each example, from outputs ``[S, B, …]``."""
    summary = summarise(outputs, link)
    values = summary.mutual_information if isinstance(summary, Prediction) else summary.variance
    return values.reshape(len(values), -1).mean(1)


def _are_classes(targets: Tensor, count: int) -> bool:
    """Whether all targets are one of the numbers from 0 to `count` - 1; binary labels may be floats."""
    is_whole = count == 2 or not targets.is_floating_point()
    return is_whole and bool((targets == targets.long()).all() and (targets >= 0).all() and (targets < count).all())
