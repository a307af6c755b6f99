"""Calibration: are 80 % of the predictions made with 80 % confidence correct?

    ECE = Σ_b n_b/N |acc_b - conf_b|           MCE = max_b |acc_b - conf_b|

over bins b of the confidence max_c p_c (Guo et al. 2017, https://arxiv.org/abs/1706.04599, with their 15 bins). The bins of
the adaptive ECE have equal numbers of examples instead of equal width (Nguyen & O'Connor 2015,
https://arxiv.org/abs/1508.05154), so sparse bins do not dominate. The class-wise ECE (Kull et al. 2019,
https://arxiv.org/abs/1910.12656) uses the probability of every class c, not only of the most probable one:

    cECE = 1/C Σ_c Σ_b n_cb/N |freq_cb - conf_cb|

with bins b of p_c, and freq_cb the fraction of class c among the examples in bin b. All values are fractions, not percent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_bayes.metrics.states import DEFAULT_BINS, BinSums, bin_sums, check_bins
from lightning_bayes.metrics.top_label import TopLabelMetric, checked_probs, mean_over_ties, top_label


class ReliabilityBins(NamedTuple):
    """Bins of equal width between 0 and 1, ``[bins]`` each; means of empty bins are ``nan``."""

    counts: Tensor  # n_b, number of examples
    confidence: Tensor  # conf_b, mean confidence
    accuracy: Tensor  # acc_b, fraction of correct examples


def expected_calibration_error(probs: Tensor, targets: Tensor, bins: int = DEFAULT_BINS) -> Tensor:
    """Top-label expected calibration error over bins of equal width of ``probs [batch, classes]``, a fraction."""
    return bin_sums(*top_label(probs, targets), bins).expected_error()[0]


def reliability_bins(probs: Tensor, targets: Tensor, bins: int = DEFAULT_BINS) -> ReliabilityBins:
    """Number of examples, mean confidence and accuracy of each bin."""
    sums = bin_sums(*top_label(probs, targets), bins)
    count, confidence, correct = (column[0] for column in sums)
    return ReliabilityBins(count.long(), confidence / count, correct / count)


class BinnedMetric(Metric, ABC):
    """Base class of errors over bins of equal width, averaged over groups with separate bins, with one summed state."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    sums: Tensor  # [3, groups, bins]

    def __init__(self, bins: int = DEFAULT_BINS, *, num_groups: int = 1, **kwargs: Any) -> None:
        check_bins(bins)
        super().__init__(**kwargs)
        self.bins = bins
        self.add_state("sums", torch.zeros(3, num_groups, bins), dist_reduce_fx="sum")

    @staticmethod
    @abstractmethod
    def measure(sums: BinSums, /) -> Tensor:
        """Compute the error of each group, ``[groups]``."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: probabilities ``[batch, classes]`` and class indices ``[batch]``."""
        self.sums = self.sums + torch.stack(self.batch_sums(preds, target)).to(self.sums.dtype)

    def batch_sums(self, preds: Tensor, target: Tensor) -> BinSums:
        """Return the sums of a batch, by default of the most probable classes in one group."""
        return bin_sums(*top_label(preds, target), self.bins)

    def compute(self) -> Tensor:
        """Return the error over all examples since the last reset; ``nan`` if there were none."""
        return self.measure(BinSums(*self.sums)).mean()


@final
class ExpectedCalibrationError(BinnedMetric):
    """Top-label expected calibration error over bins of equal width."""

    measure = staticmethod(BinSums.expected_error)


@final
class MaximumCalibrationError(BinnedMetric):
    """Largest gap between accuracy and confidence in any bin of equal width."""

    measure = staticmethod(BinSums.largest_error)


@final
class ClasswiseCalibrationError(BinnedMetric):
    """Calibration error of each class's probability over bins of equal width, averaged over classes."""

    measure = staticmethod(BinSums.expected_error)

    def __init__(self, num_classes: int, bins: int = DEFAULT_BINS, **kwargs: Any) -> None:
        super().__init__(bins, num_groups=num_classes, **kwargs)

    def batch_sums(self, preds: Tensor, target: Tensor) -> BinSums:
        """Return the sums of a batch, with one group per class."""
        probs = checked_probs(preds, target)
        num_classes = probs.shape[1]
        is_class = torch.nn.functional.one_hot(target.long(), num_classes)
        classes = torch.arange(num_classes, device=probs.device).expand_as(probs)
        return bin_sums(probs.flatten(), is_class.flatten(), self.bins, classes.flatten(), num_classes)


@final
class AdaptiveCalibrationError(TopLabelMetric):
    """Top-label expected calibration error over bins with equal numbers of examples, sorted by confidence.

    With ``N`` examples, the first ``N % bins`` bins have one more than the others. Examples with equal confidence each count
    with their mean accuracy, so the result does not depend on their order.
    """

    higher_is_better = False

    def __init__(self, bins: int = DEFAULT_BINS, **kwargs: Any) -> None:
        check_bins(bins)
        super().__init__(**kwargs)
        self.bins = bins

    @override
    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        gap = mean_over_ties(confidence, correct) - confidence
        gaps_per_bin = gap[confidence.argsort()].tensor_split(self.bins)
        # n_b |acc_b - conf_b| = |Σ gap|
        return torch.stack([bin_gaps.sum().abs() for bin_gaps in gaps_per_bin]).sum() / len(gap)
