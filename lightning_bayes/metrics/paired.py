"""Two predictions of the same examples: how their scores differ, with the standard error of the difference.

Each example gives a vector v_i with what both scores need of it. A score is a function S of the mean vector v̄, and

    se(Δ) = sqrt(∇Δ(v̄)ᵀ Cov(v_i) ∇Δ(v̄) / N)        Δ = S_first(v̄) - S_second(v̄)

by the delta method. The predictions share their examples, so what makes an example hard for both cancels in Δ. Only sums
over examples are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_bayes.metrics.scoring import nll_per_example
from lightning_bayes.metrics.states import DEFAULT_BINS, bin_index
from lightning_bayes.metrics.top_label import top_label


class Paired(NamedTuple):
    """A score of both predictions."""

    first: float
    second: float
    error: float  # standard error of first - second

    @property
    def differs(self) -> bool:
        """Whether the scores differ by at least two standard errors."""
        return abs(self.first - self.second) >= 2 * self.error > 0


class PairedScores(ABC):
    """Base class: collects a vector per example. A subclass's ``update`` calls `add`.

    Args:
        size: Number of entries of a vector.
    """

    names: tuple[str, ...]  # of the scores, as metric keys

    def __init__(self, size: int) -> None:
        # Sums of all products of two entries, the first of which is 1.
        self._sums = torch.zeros((size + 1, size + 1), dtype=torch.float64)

    def add(self, *columns: Tensor) -> None:
        """Add a batch: columns ``[batch]`` or ``[batch, entries]``, in the order of the vector."""
        wide = [column.detach().reshape(len(column), -1).cpu().double() for column in columns]
        values = torch.cat([torch.ones_like(wide[0][:, :1]), *wide], 1)
        self._sums += values.T @ values

    @abstractmethod
    def scores(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """All scores of the first and of the second prediction, from the mean vector."""

    def compute(self, reduce: Callable[[Tensor], Tensor] = lambda total: total) -> dict[str, Paired]:
        """Both scores and the standard error of their difference, by name; `reduce` sums over processes."""
        sums = reduce(self._sums).cpu()
        count = sums[0, 0]
        if count == 0:
            return {}
        with torch.inference_mode(False):
            mean = (sums[0, 1:] / count).clone()
            covariance = sums[1:, 1:] / count - mean.outer(mean)
            gradient = torch.func.jacrev(lambda v: torch.sub(*self.scores(v)))(mean).nan_to_num()
            variance = ((gradient @ covariance) * gradient).sum(1) / count
        columns = (*self.scores(mean), variance.clamp(min=0).sqrt())
        return {name: Paired(*values) for name, *values in zip(self.names, *(c.tolist() for c in columns), strict=True)}


@final
class PairedClassification(PairedScores):
    """Accuracy, NLL in nats and top-label ECE over bins of equal width, of two predictions of the same classes.

    Args:
        bins: Number of bins.
    """

    names = ("cls/Acc", "cls/NLL", "cal/ECE")

    def __init__(self, bins: int = DEFAULT_BINS) -> None:
        super().__init__(2 * (2 + bins))
        self._bins = bins

    def update(self, first: Tensor, second: Tensor, targets: Tensor) -> None:
        """Add a batch: class probabilities ``[batch, …, classes]`` of both, and class indices ``[batch, …]``."""
        self.add(*self._columns(first, targets), *self._columns(second, targets))

    def _columns(self, probs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """For each example: fraction of correct labels, mean NLL, and the gaps of its labels summed by bin."""
        flat, labels = probs.reshape(-1, probs.shape[-1]), targets.flatten()
        values = (*top_label(flat, labels), nll_per_example(flat, labels))
        return self.columns(*(value.view(len(targets), -1) for value in values))

    def columns(self, confidence: Tensor, correct: Tensor, nll: Tensor) -> tuple[Tensor, ...]:
        """The columns of `add` for one prediction, from the values of each label, ``[batch, labels]`` or ``[batch]``."""
        confidence, correct, nll = (value.view(len(value), -1) for value in (confidence, correct, nll))
        gaps = confidence.new_zeros(len(confidence), self._bins)
        gaps.scatter_add_(1, bin_index(confidence, self._bins), (correct - confidence) / confidence.shape[1])
        return correct.mean(1), nll.mean(1), gaps

    def scores(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """The ECE is the sum of the absolute mean gaps of the bins."""
        first, second = (torch.cat([half[:2], half[2:].abs().sum(0, keepdim=True)]) for half in mean.chunk(2))
        return first, second


@final
class PairedRegression(PairedScores):
    """Root mean squared error and, with log-densities, NLL in nats, of two predictions of the same target values."""

    def __init__(self) -> None:
        super().__init__(4)
        self.names: tuple[str, ...] = ("reg/RMSE",)

    def update(self, first: Tensor, second: Tensor, targets: Tensor, *log_densities: Tensor) -> None:
        """Add a batch: both means, the targets, and the log-densities of the targets under both, ``[batch, …]`` each."""
        if log_densities:
            self.names = ("reg/RMSE", "reg/NLL")
        squares = [(mean - targets).double().square() for mean in (first, second)]
        columns = [*squares, *(log_densities or [torch.zeros_like(values) for values in squares])]
        self.add(*(values.reshape(len(targets), -1).mean(1) for values in columns))

    @override
    def scores(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([mean[:2].sqrt(), -mean[2:]]).view(-1, 2)[: len(self.names)]
        return both[:, 0], both[:, 1]
