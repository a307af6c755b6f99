"""What metrics accumulate: sums over examples, sums over confidence bins, or all values where they must be sorted.

Sums of shards add up to the sums of the full data, so metrics built on them are exact on any number of processes and their
memory does not grow with the number of examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_bayes.errors import HyperparameterError

DEFAULT_BINS = 15  # Guo et al. 2017


class BinSums(NamedTuple):
    """Sums over the examples of each group and bin, ``[groups, bins]`` each, in the dtype of the confidences."""

    counts: Tensor  # n_b
    confidence: Tensor  # n_b conf_b
    correct: Tensor  # n_b acc_b

    def gap(self) -> Tensor:
        """``n_b |acc_b - conf_b|``; 0 where a bin is empty."""
        return (self.correct - self.confidence).abs()

    def expected_error(self) -> Tensor:
        """``Σ_b n_b / n |acc_b - conf_b|`` of each group, ``[groups]``; ``nan`` for a group without examples."""
        return self.gap().sum(-1) / self.counts.sum(-1)

    def largest_error(self) -> Tensor:
        """``max_b |acc_b - conf_b|`` of each group over the bins that are not empty, ``[groups]``."""
        errors = self.gap() / self.counts.clamp(min=1)
        return errors.amax(-1).where(self.counts.sum(-1) > 0, torch.nan)


def bin_sums(
    confidence: Tensor, correct: Tensor, bins: int, group: Tensor | None = None, num_groups: int = 1
) -> BinSums:
    """Sum confidences and correct predictions over bins."""
    check_bins(bins)
    index = bin_index(confidence, bins)
    if group is not None:
        index = index + bins * group

    def total(values: Tensor) -> Tensor:
        sums = confidence.new_zeros(num_groups * bins).index_add_(0, index, values.to(confidence.dtype))
        return sums.view(num_groups, bins)

    return BinSums(total(torch.ones_like(confidence)), total(confidence), total(correct))


def bin_index(confidence: Tensor, bins: int) -> Tensor:
    """The bin of each confidence: bin ``b`` is ``[b/bins, (b+1)/bins)``, and the last one includes 1."""
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)
    return (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins - 1)


def check_bins(bins: int) -> None:
    """Raise a `HyperparameterError` if there is no bin."""
    if bins < 1:
        raise HyperparameterError(
            f"A calibration metric needs at least one bin, got bins={bins}. The usual number is 15."
        )


class MeanOverExamples(Metric, ABC):
    """Base class of means over examples. ``update`` of a subclass calls ``add``."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    @abstractmethod
    def update(self, *args: Tensor) -> None:
        """Compute the values of a batch and ``add`` them."""

    def add(self, values: Tensor) -> None:
        """Add one value per example, in a tensor of any shape."""
        self.total = self.total + values.sum().to(self.total.dtype)
        self.count = self.count + values.numel()

    def compute(self) -> Tensor:
        """Return the mean over all examples since the last reset; ``nan`` if there were none."""
        return self.total / self.count


class StoredMetric(Metric, ABC):
    """Stores columns of one value per example. ``update`` of a subclass calls `store`."""

    is_differentiable = False
    full_state_update = False

    columns: ClassVar[tuple[str, ...]]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in self.columns:
            self.add_state(name, [], dist_reduce_fx="cat")

    @abstractmethod
    def measure(self, *columns: Any, **options: Any) -> Any:
        """Compute the metric from the columns of all examples."""

    def store(self, *values: Tensor) -> None:
        """Add the columns of a batch, ``[batch]`` each."""
        for name, column in zip(self.columns, values, strict=True):
            getattr(self, name).append(column.detach().to(self.dtype))

    def compute(self) -> Any:
        """Return the value over all examples since the last reset; ``nan`` if it is undefined."""
        return self.measure(*map(self._stored, self.columns))

    def _stored(self, name: str) -> Tensor:
        """All values of a column, over all processes after synchronization."""
        state = getattr(self, name)
        if isinstance(state, list) and not state:  # torchmetrics raises an error
            return torch.empty(0, dtype=self.dtype, device=self.device)
        return dim_zero_cat(state)
