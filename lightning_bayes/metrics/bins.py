"""Sums over confidence bins of equal width, the only state of binned calibration errors.

The sums of shards add up to the sums of the full data, so metrics built on them are exact on any number of processes and
their memory does not grow with the number of examples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
    """Sum confidences and correct predictions over bins.

    Args:
        confidence: Values between 0 and 1, ``[batch]``.
        correct: 1 for correct predictions, otherwise 0, ``[batch]``.
        bins: Number of bins; bin ``b`` is ``[b/bins, (b+1)/bins)``, and the last one includes 1.
        group: Group index of each example, ``[batch]``; a single group by default.
        num_groups: Number of groups.

    Returns:
        The sums.

    Example:
        >>> bin_sums(torch.tensor([0.8, 0.6, 1.0]), torch.tensor([1.0, 0.0, 1.0]), bins=2).correct
        tensor([[0., 2.]])
    """
    check_bins(bins)
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)
    index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins - 1)
    if group is not None:
        index = index + bins * group

    def total(values: Tensor) -> Tensor:
        sums = confidence.new_zeros(num_groups * bins).index_add_(0, index, values.to(confidence.dtype))
        return sums.view(num_groups, bins)

    return BinSums(total(torch.ones_like(confidence)), total(confidence), total(correct))


def check_bins(bins: int) -> None:
    """Raise a `HyperparameterError` if there is no bin."""
    if bins < 1:
        raise HyperparameterError(
            f"A calibration metric needs at least one bin, got bins={bins}. The usual number is 15."
        )
