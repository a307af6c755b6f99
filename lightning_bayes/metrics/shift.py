"""Accuracy, NLL, Brier score and ECE under distribution shift, by kind and severity.

This follows Ovadia et al. 2019 (https://arxiv.org/abs/1906.02530), with the corruptions of Hendrycks & Dietterich 2019
(https://arxiv.org/abs/1903.12261): one test set, corrupted in several ways and at several severities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics.scoring import brier_per_example, nll_per_example
from lightning_bayes.metrics.states import DEFAULT_BINS, BinSums, bin_sums
from lightning_bayes.metrics.top_label import top_label

SHIFT_KEYS = ("cls/Acc", "cls/NLL", "cls/Brier", "cal/ECE")


@final
class ShiftMetrics(Metric):
    """Metrics of a classifier on shifted copies of the test set. The states are sums.

    ``compute`` returns ``{kind}/{severity}/{metric}`` for each shift, ``all/{severity}/{metric}`` for the mean over all
    kinds at a severity, and ``{metric}`` for the mean over all shifts. The metrics are ``cls/Acc``, ``cls/NLL``,
    ``cls/Brier`` and ``cal/ECE``. Means weight all shifts equally.

    Args:
        shifts: Kind and severity of each shift, such as ``("fog", 3)``; at least one, each once.
        prefix: Prefix of every key, including the slash.
        **kwargs: Passed to `torchmetrics.Metric`.

    Raises:
        HyperparameterError: If there are no shifts, or a shift occurs twice.
    """

    is_differentiable = False
    full_state_update = False

    bin_sums: Tensor  # [3, shifts, bins]
    score_sums: Tensor  # [shifts, 2]: NLL and Brier score

    def __init__(self, shifts: Sequence[tuple[str, int]], prefix: str = "shift/", **kwargs: Any) -> None:
        if not shifts or len(set(shifts)) < len(shifts):
            raise HyperparameterError(f"shifts={shifts} must contain at least one (kind, severity), and each once.")
        super().__init__(**kwargs)
        self.shifts, self.prefix = list(shifts), prefix
        self.add_state("bin_sums", torch.zeros(3, len(shifts), DEFAULT_BINS), dist_reduce_fx="sum")
        self.add_state("score_sums", torch.zeros(len(shifts), 2), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor, shift: int) -> None:
        """Add a batch: probabilities ``[batch, classes]``, class indices ``[batch]``, and the index of its shift."""
        confidence, correct = top_label(preds, target)
        group = torch.full((len(confidence),), shift, device=confidence.device)
        bins = bin_sums(confidence, correct, DEFAULT_BINS, group, len(self.shifts))
        self.bin_sums = self.bin_sums + torch.stack(bins).to(self.bin_sums.dtype)
        scores = torch.stack([nll_per_example(preds, target).sum(), brier_per_example(preds, target).sum()])
        self.score_sums = self.score_sums.clone()
        self.score_sums[shift] += scores.to(self.score_sums.dtype)

    def compute(self) -> dict[str, Tensor]:
        """Return the values over all examples since the last reset, by key; ``nan`` for a shift without examples."""
        values = self._by_shift()
        result: dict[str, Tensor] = {}
        for index, (kind, severity) in enumerate(self.shifts):
            result |= self._with_keys(f"{kind}/{severity}/", values[index])
        for severity in sorted({severity for _, severity in self.shifts}):
            indices = [index for index, (_, other) in enumerate(self.shifts) if other == severity]
            result |= self._with_keys(f"all/{severity}/", values[indices].mean(0))
        return result | self._with_keys("", values.mean(0))

    def _by_shift(self) -> Tensor:
        """Values of all metrics, ``[shifts, metrics]``."""
        sums = BinSums(*self.bin_sums)
        count = sums.counts.sum(-1)
        nll, brier = (self.score_sums / count.unsqueeze(-1)).unbind(-1)
        return torch.stack([sums.correct.sum(-1) / count, nll, brier, sums.expected_error()], -1)

    def _with_keys(self, middle: str, values: Tensor) -> dict[str, Tensor]:
        return {f"{self.prefix}{middle}{key}": value for key, value in zip(SHIFT_KEYS, values, strict=True)}


def by_severity(logged: Mapping[str, Any], suffix: str = "") -> dict[str, dict[int, list[float]]]:
    """The shift metrics that a test logged: for each metric, the values of all kinds by severity; 0 is the test set."""
    curves: dict[str, dict[int, list[float]]] = {}
    for key, value in logged.items():
        parts = key.split("/")
        if parts[0] == f"shift{suffix}" and len(parts) > 3 and parts[1] != "all" and parts[2].isdecimal():
            metric = "/".join(parts[3:])
            curves.setdefault(metric, {}).setdefault(int(parts[2]), []).append(float(value))
    for metric, curve in curves.items():
        if f"test{suffix}/{metric}" in logged:
            curve[0] = [float(logged[f"test{suffix}/{metric}"])]
    return {metric: dict(sorted(curve.items())) for metric, curve in curves.items()}
