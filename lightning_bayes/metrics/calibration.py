"""Calibration: do predictions made with 80 % confidence come true in 80 % of the cases?

    ECE = Σ_b n_b/N |acc_b - conf_b|           MCE = max_b |acc_b - conf_b|

over bins b of the confidence max_c p_c (Guo et al. 2017, https://arxiv.org/abs/1706.04599, with their 15 bins). The
adaptive ECE has bins of equal numbers of examples instead of equal width (Nguyen & O'Connor 2015,
https://arxiv.org/abs/1508.05154), so that sparse bins do not decide. All values are fractions, not percent.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassCalibrationError
from torchmetrics.functional.classification import multiclass_calibration_error

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics.top_label import TopLabel, TopLabelMetric, checked_probs, mean_over_ties, top_label

DEFAULT_BINS = 15  # Guo et al. 2017


class ReliabilityBins(NamedTuple):
    """Bins of equal width between 0 and 1, ``[bins]`` each; the two means are ``nan`` where a bin is empty."""

    counts: Tensor  # n_b, number of examples
    confidence: Tensor  # conf_b, mean confidence
    accuracy: Tensor  # acc_b, share of correct examples


def expected_calibration_error(probs: Tensor, targets: Tensor, bins: int = DEFAULT_BINS) -> Tensor:
    """Top-label expected calibration error over bins of equal width, through torchmetrics.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.
        bins: Number of bins; bin ``b`` is ``[b/bins, (b+1)/bins)``, and the last one includes 1.

    Returns:
        A scalar between 0 and 1.

    Example:
        >>> expected_calibration_error(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1]))
        tensor(0.3000)
    """
    return _calibration_error(probs, targets, bins, "l1")


def maximum_calibration_error(probs: Tensor, targets: Tensor, bins: int = DEFAULT_BINS) -> Tensor:
    """Largest gap between accuracy and confidence in any bin of equal width, through torchmetrics.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.
        bins: Number of bins, as in `expected_calibration_error`.

    Returns:
        A scalar between 0 and 1.

    Example:
        >>> maximum_calibration_error(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 0]))
        tensor(0.6000)
    """
    return _calibration_error(probs, targets, bins, "max")


def _calibration_error(probs: Tensor, targets: Tensor, bins: int, norm: Literal["l1", "max"]) -> Tensor:
    _check_bins(bins)
    probs = _below_one(checked_probs(probs, targets))
    num_classes = probs.shape[1]
    return multiclass_calibration_error(probs, targets, num_classes, n_bins=bins, norm=norm, validate_args=False)


def _below_one(probs: Tensor) -> Tensor:
    # torchmetrics takes probabilities that rounding left above 1 for logits, and puts those of exactly 1 (a saturated
    # softmax) in a bin of their own. It bins in float32, whose largest number below 1 is 6e-8 away.
    return probs.float().clamp(max=1 - torch.finfo(torch.float32).eps / 2)


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise HyperparameterError(
            f"A calibration metric needs at least one bin, got bins={bins}. The usual number is 15."
        )


def adaptive_calibration_error(probs: Tensor, targets: Tensor, bins: int = DEFAULT_BINS) -> Tensor:
    """Top-label expected calibration error over bins of equal mass: sorted by confidence, equally many examples each.

    With ``N`` examples the first ``N % bins`` bins have one more than the others. Examples of equal confidence count
    with their mean accuracy, so the result does not depend on their order.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.
        bins: Number of bins.

    Returns:
        A scalar between 0 and 1.

    Example:
        >>> adaptive_calibration_error(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 0]), bins=2)
        tensor(0.4000)
    """
    return _adaptive_error(top_label(probs, targets), bins)


def _adaptive_error(seen: TopLabel, bins: int) -> Tensor:
    _check_bins(bins)
    gap = mean_over_ties(seen.confidence, seen.correct) - seen.confidence
    masses = gap[seen.confidence.argsort()].tensor_split(bins)
    return torch.stack([mass.sum().abs() for mass in masses]).sum() / len(gap)  # n_b |acc_b - conf_b| = |Σ gap|


def reliability_bins(probs: Tensor, targets: Tensor, bins: int = DEFAULT_BINS) -> ReliabilityBins:
    """Count, mean confidence and accuracy per bin: what a reliability diagram shows and the ECE sums up.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.
        bins: Number of bins, as in `expected_calibration_error`.

    Returns:
        Three tensors ``[bins]``.

    Example:
        >>> reliability_bins(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 0]), bins=2).counts
        tensor([0, 2])
        >>> reliability_bins(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 0]), bins=2).accuracy
        tensor([   nan, 0.5000])
    """
    _check_bins(bins)
    confidence, correct = top_label(probs, targets)
    edges = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype, device=confidence.device)
    index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(max=bins - 1)
    counts = torch.bincount(index, minlength=bins)
    zeros = confidence.new_zeros(bins)
    confidence_sum = zeros.index_add(0, index, confidence)
    return ReliabilityBins(counts, confidence_sum / counts, zeros.index_add(0, index, correct) / counts)


class CalibrationError(MulticlassCalibrationError):
    """Base of the two metrics over bins of equal width: torchmetrics' metric, which here never guesses logits."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Remember a batch: probabilities ``[batch, classes]`` and class indices ``[batch]``."""
        super().update(_below_one(checked_probs(preds, target)), target)


@final
class ExpectedCalibrationError(CalibrationError):
    """Top-label expected calibration error over bins of equal width (see `expected_calibration_error`).

    Args:
        num_classes: Number of classes.
        bins: Number of bins.
        **kwargs: Passed to `torchmetrics.Metric`.

    Example:
        >>> metric = ExpectedCalibrationError(num_classes=2)
        >>> metric(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1]))
        tensor(0.3000)
    """

    def __init__(self, num_classes: int, bins: int = DEFAULT_BINS, **kwargs: Any) -> None:
        _check_bins(bins)
        super().__init__(num_classes, n_bins=bins, norm="l1", validate_args=False, **kwargs)


@final
class MaximumCalibrationError(CalibrationError):
    """Largest gap between accuracy and confidence in any bin of equal width (see `maximum_calibration_error`).

    Args:
        num_classes: Number of classes.
        bins: Number of bins.
        **kwargs: Passed to `torchmetrics.Metric`.

    Example:
        >>> metric = MaximumCalibrationError(num_classes=2)
        >>> metric(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 0]))
        tensor(0.6000)
    """

    def __init__(self, num_classes: int, bins: int = DEFAULT_BINS, **kwargs: Any) -> None:
        _check_bins(bins)
        super().__init__(num_classes, n_bins=bins, norm="max", validate_args=False, **kwargs)


@final
class AdaptiveCalibrationError(TopLabelMetric):
    """Top-label expected calibration error over bins of equal mass (see `adaptive_calibration_error`).

    Args:
        bins: Number of bins.
        **kwargs: Passed to `torchmetrics.Metric`.

    Example:
        >>> metric = AdaptiveCalibrationError(bins=2)
        >>> metric(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 0]))
        tensor(0.4000)
    """

    higher_is_better = False

    def __init__(self, bins: int = DEFAULT_BINS, **kwargs: Any) -> None:
        _check_bins(bins)
        super().__init__(**kwargs)
        self.bins = bins

    def compute(self) -> Tensor:
        """Return the error over all examples since the last reset."""
        return _adaptive_error(self.top_labels(), self.bins)
