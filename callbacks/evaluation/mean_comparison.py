"""What averaging over samples changes: scores of the average beside those of the mean, on the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, final

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_bayes.callbacks.evaluation.observed_metrics import targets_of
from lightning_bayes.callbacks.evaluation.sampled_network import SampledCall, SampledNetwork
from lightning_bayes.likelihood import ScoredOutput
from lightning_bayes.likelihood.base import flattened, num_samples
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.likelihood.predictions import mutual_information
from lightning_bayes.metrics.paired import Paired, PairedClassification, PairedRegression
from lightning_bayes.metrics.regression import mixture_nll

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


@final
class Pairs:
    """Collects two predictions of the same targets: the average over samples, and that at the mean."""

    def __init__(self, has_classes: bool) -> None:
        self._scores: PairedClassification | PairedRegression
        self._scores = PairedClassification() if has_classes else PairedRegression()
        self._uncertainty = torch.zeros(2, dtype=torch.float64)  # sums over examples of 1 and of the uncertainty

    def add(
        self,
        values: Tensor,
        at_mean: Tensor,
        targets: Tensor,
        counted: Tensor | None = None,
        log_densities: tuple[Tensor, ...] = (),
    ) -> None:
        """Add a batch.

        Args:
            values: Class probabilities ``[S, B, …, classes]`` or means ``[S, B, …]`` under each sample.
            at_mean: Those at the mean, without S.
            targets: ``[B, …]``.
            counted: Mask of the targets that count; None for all.
            log_densities: Of real-valued targets, under the average and at the mean.
        """
        is_class = isinstance(self._scores, PairedClassification)
        uncertainty = mutual_information(values) if is_class else values.var(0, correction=0)
        columns = [values.mean(0), at_mean, targets.long() if is_class else targets, *log_densities]
        if counted is not None:
            uncertainty, *columns = (column[counted] for column in (uncertainty, *columns))
        if len(columns[0]):
            self._scores.update(*columns)
        uncertainty = uncertainty.reshape(len(uncertainty), -1).mean(1).cpu().double()
        self._uncertainty += torch.stack([torch.ones_like(uncertainty), uncertainty]).sum(1)

    def compute(self, reduce: Callable[[Tensor], Tensor], samples: int, beside: str = "the mean") -> Comparison | None:
        """The result, from the sums over processes; None without examples."""
        (count, uncertainty), scores = reduce(self._uncertainty).tolist(), self._scores.compute(reduce)
        return Comparison(scores, int(count), uncertainty / count, samples, beside) if count else None


@final
class MeanComparison:
    """Collects the scores of both predictions over the batches of one evaluation.

    A step's result may hold ``outputs``, ``mean_outputs`` and ``targets``, as the zoo's tasks return. Otherwise the step has
    to call ``self(...)`` once, on a batch that tells its targets; the mean then costs one more forward pass. Other batches
    are left out.
    """

    def __init__(self, network: SampledNetwork, scored: ScoredOutput) -> None:
        self._network, self._scored, self._kind = network, scored, scored.kind
        self._pairs = Pairs(scored.kind.has_classes)

    def update(self, trainer: Trainer, returned: Any, batch: Any, call: SampledCall | None) -> None:
        """Add a batch, the result of its step and the step's only call of ``self(...)``."""
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            if not self._add_returned(returned) and call is not None:
                self._add_called(call, batch)

    def compute(self, reduce: Callable[[Tensor], Tensor]) -> Comparison | None:
        """The result, from the sums over processes; None without examples."""
        return self._pairs.compute(reduce, self._network.samples.count)

    def _add_returned(self, step: Any) -> bool:
        """Add what a step has returned; False if something is missing."""
        tensors = [step.get(name) for name in _RETURNED] if isinstance(step, dict) else []
        found = [value for value in tensors if isinstance(value, Tensor)]
        if len(found) < len(_RETURNED):
            return False
        outputs, mean, targets = found
        values, at_mean = self._predicted(outputs), self._predicted(mean[None])[0]
        aligned = self._aligned(values, targets)
        if aligned is None:
            return False
        densities = [step[name] for name in ("log_densities", "mean_log_densities") if name in step]
        both = (-mixture_nll(densities[0]), densities[1]) if len(densities) == 2 else ()
        self._pairs.add(values, at_mean, aligned, log_densities=both)
        return True

    def _add_called(self, call: SampledCall, batch: Any) -> None:
        """Add the outputs of a call, for targets that are known."""
        known = targets_of(self._scored, call.outputs, batch)
        if known is None:
            return
        kind, outputs = self._kind, self._scored.parts_of(call.outputs)
        output = mapped(
            lambda leaf: leaf.to(torch.promote_types(leaf.dtype, torch.float32)), self._network.at_mean(call.call)
        )
        at_mean = mapped(lambda leaf: leaf[None], self._scored.parts_of(output))
        values = self._predicted(outputs) if kind.has_classes else _means(kind.mean, outputs)
        aligned = self._aligned(values, known.targets)
        if aligned is None:
            return
        both: tuple[Tensor, ...] = ()
        if kind.has_noise:
            both = kind.log_predictive(outputs, aligned), kind.log_predictive(at_mean, aligned)
        single = self._predicted(at_mean)[0] if kind.has_classes else _means(kind.mean, at_mean)[0]
        counted = None if known.mask is None else known.mask.reshape(aligned.shape)
        self._pairs.add(values, single, aligned, counted, both)

    def _predicted(self, outputs: Tensor) -> Tensor:
        """Class probabilities, or values as they are."""
        return self._kind.class_probs(outputs) if self._kind.has_classes else outputs

    def _aligned(self, values: Tensor, targets: Tensor) -> Tensor | None:
        """Class indices, or targets in the shape of one sample's values; None if they are something else."""
        shape = values.shape[1:-1] if self._kind.has_classes else values.shape[1:]
        fits = targets.shape[:1] == shape[:1] and targets.numel() == shape.numel()
        fits = fits and not (self._kind.has_classes and not _are_classes(targets, values.shape[-1]))
        return targets.reshape(shape) if fits and bool(values.isfinite().all()) else None


def _means(mean: Callable[[Any], Tensor], outputs: Any) -> Tensor:
    """The means of the targets under each sample, ``[S, B, …]``, of outputs ``[S, B, …]``."""
    return torch.unflatten(mean(flattened(outputs)), 0, (num_samples(outputs), -1))


def _are_classes(targets: Tensor, count: int) -> bool:
    """Whether all targets are one of the numbers from 0 to `count` - 1; binary labels may be floats."""
    is_whole = count == 2 or not targets.is_floating_point()
    return is_whole and bool((targets == targets.long()).all() and (targets >= 0).all() and (targets < count).all())
