"""Test metrics of a classifier: on the test set, on out-of-distribution sets, and on shifted copies of the test set.

Test loaders have a fixed order: the test set, the data module's ``ood_names``, then its ``shift_names``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import Categorical
from lightning_bayes.metrics import OODDetection, ShiftMetrics
from lightning_bayes.predictive import OOD_SCORES, mutual_information


class EvaluationSets(NamedTuple):
    """The data sets of the test loaders after the test set."""

    ood: tuple[str, ...] = ()  # out-of-distribution sets, whose targets are ignored
    shifts: tuple[tuple[str, int], ...] = ()  # kind and severity of each shifted copy of the test set

    def names(self) -> list[str]:
        """One name per loader: ``test``, then for example ``ood/svhn``, then for example ``shift/fog/3``."""
        return [
            "test",
            *(f"ood/{name}" for name in self.ood),
            *(f"shift/{kind}/{level}" for kind, level in self.shifts),
        ]


def named_sets(datamodule: Any, num_loaders: int) -> EvaluationSets:
    """Read the names of the test loaders from a data module."""
    shifts = tuple((str(kind), int(severity)) for kind, severity in getattr(datamodule, "shift_names", None) or ())
    num_ood = num_loaders - 1 - len(shifts)
    ood = tuple(getattr(datamodule, "ood_names", None) or [f"set{i + 1}" for i in range(num_ood)])
    if len(ood) != num_ood or len(set(ood)) < len(ood) or len(set(shifts)) < len(shifts):
        shift_names = f" and shift_names is {list(shifts)}" if shifts else ""
        raise HyperparameterError(
            f"{type(datamodule).__name__}.ood_names is {list(ood)}{shift_names}, but test_dataloader returns "
            f"{num_loaders - 1} sets after the test set. Name each set once, in loader order."
        )
    return EvaluationSets(ood, shifts)


@final
class ExampleStatistics(Metric):
    """The number of test examples, the standard error of their mean NLL, and their mean mutual information in nats."""

    full_state_update = False
    sums: Tensor  # of 1, of NLL, of its square, and of mutual information, over examples
    samples: Tensor  # the largest number of a batch, on any process

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.add_state("sums", torch.zeros(4), dist_reduce_fx="sum")
        self.add_state("samples", torch.ones(()), dist_reduce_fx="max")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch of logits ``[samples, batch, classes]`` and class indices ``[batch]``."""
        self.samples = self.samples.clamp(min=len(outputs))
        nll = F.nll_loss(Categorical().combine(outputs), targets, reduction="none")
        information = mutual_information(outputs.softmax(-1))
        self.sums += torch.stack([torch.ones_like(nll), nll, nll.square(), information]).sum(1)

    def compute(self) -> dict[str, Tensor]:
        """The values by key."""
        count, nll, square, information = self.sums
        variance = (square / count - (nll / count).square()).clamp(min=0)
        values = {"n": count, "cls/NLL_SE": (variance / count).sqrt()}
        if self.samples > 1:
            values["cls/MI"] = information / count
        return {f"{self.prefix}{key}": value for key, value in values.items()}


@final
class ClassifierEvaluation:
    """Metrics of one predictor over all test loaders."""

    def __init__(
        self,
        metrics: MetricCollection,
        sets: EvaluationSets,
        suffix: str = "",
        scores: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.metrics, self.sets = metrics, sets
        self.scores = tuple(scores)
        self.detection = OODDetection(sets.ood, scores, f"ood{suffix}/").to(device) if sets.ood else None
        self.shift = ShiftMetrics(sets.shifts, f"shift{suffix}/").to(device) if sets.shifts else None
        self.examples = ExampleStatistics(metrics.prefix or "").to(device)

    def update(self, outputs: Tensor, targets: Tensor, dataloader_idx: int) -> None:
        """Add a batch of logits ``[samples, batch, classes]`` and class indices ``[batch]``."""
        first_shift = 1 + len(self.sets.ood)
        if self.detection is not None and dataloader_idx < first_shift:
            self.detection.update({name: OOD_SCORES[name](outputs) for name in self.scores}, dataloader_idx)
        if dataloader_idx == 0:
            self.metrics.update(Categorical().combine(outputs).exp(), targets)
            self.examples.update(outputs, targets)
        elif self.shift is not None and dataloader_idx >= first_shift:
            self.shift.update(Categorical().combine(outputs).exp(), targets, dataloader_idx - first_shift)

    def compute(self) -> dict[str, Tensor]:
        """All metric values over all batches, on all processes."""
        values: dict[str, Tensor] = {**self.metrics.compute(), **self.examples.compute()}
        for metric in (self.detection, self.shift):
            if metric is not None:
                values = values | metric.compute()
        return values
