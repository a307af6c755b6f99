"""Selective prediction: the error rate on the inputs with the highest confidence.

    AURC = 1/N Σ_k risk(k),        risk(k) = fraction of errors among the k examples of highest confidence max_c p_c

This is the area under the risk-coverage curve (Geifman et al. 2019, https://arxiv.org/abs/1805.08206), as a mean over the N
coverages 1/N … 1. Some libraries integrate the same curve by the trapezoid rule, which differs by O(1/N).

Two points of the curve are useful in practice (Geifman & El-Yaniv 2017, https://arxiv.org/abs/1705.08500): the coverage at a
risk of 5 %, and the risk at a coverage of 80 %. Inputs above a confidence threshold are answered, so inputs with equal
confidence are either all answered or all rejected.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics.top_label import TopLabelMetric, mean_over_ties, top_label

DEFAULT_RISK = 0.05
DEFAULT_COVERAGE = 0.8


class RiskCoverage(NamedTuple):
    """The risk-coverage curve, with one point per distinct confidence as the threshold, ``[points]`` each."""

    coverage: Tensor  # fraction of examples at or above the threshold, in increasing order; the last one is 1
    risk: Tensor  # fraction of errors among these examples


def risk_coverage(probs: Tensor, targets: Tensor) -> RiskCoverage:
    """Risk against coverage for every threshold of the largest probability.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.

    Returns:
        Two tensors ``[points]``, from only the most confident examples to all examples.

    Example:
        >>> risk_coverage(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        RiskCoverage(coverage=tensor([0.5000, 1.0000]), risk=tensor([0.0000, 0.5000]))
    """
    return _curve(*top_label(probs, targets))


def _curve(confidence: Tensor, correct: Tensor) -> RiskCoverage:
    distinct, group, count = torch.unique(confidence, return_inverse=True, return_counts=True)
    errors = torch.zeros_like(distinct).index_add_(0, group, 1 - correct)
    answered = count.flip(0).cumsum(0)
    return RiskCoverage(answered / len(confidence), errors.flip(0).cumsum(0) / answered)


def coverage_at_risk(probs: Tensor, targets: Tensor, risk: float = DEFAULT_RISK) -> Tensor:
    """Largest fraction of inputs that can be answered with at most the given fraction of errors.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.
        risk: Tolerated fraction of errors, from 0 to 1.

    Returns:
        A scalar between 0 (no threshold meets the risk) and 1 (all inputs can be answered).

    Example:
        >>> coverage_at_risk(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(0.5000)
    """
    _check_fraction("risk", risk)
    return _coverage_at(risk_coverage(probs, targets), risk)


def _coverage_at(curve: RiskCoverage, risk: float) -> Tensor:
    return (curve.coverage * (curve.risk <= risk)).max() if len(curve.risk) else _undefined(curve)


def risk_at_coverage(probs: Tensor, targets: Tensor, coverage: float = DEFAULT_COVERAGE) -> Tensor:
    """Fraction of errors among the answers if at least the given fraction of inputs is answered, the most confident first.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.
        coverage: Fraction of the inputs to answer, from 0 to 1.

    Returns:
        A scalar between 0 and 1.

    Example:
        >>> risk_at_coverage(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(0.5000)
    """
    _check_fraction("coverage", coverage)
    return _risk_at(risk_coverage(probs, targets), coverage)


def _risk_at(curve: RiskCoverage, coverage: float) -> Tensor:
    return curve.risk[curve.coverage >= coverage][0] if len(curve.risk) else _undefined(curve)


def _undefined(curve: RiskCoverage) -> Tensor:
    return curve.risk.new_full((), torch.nan)


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise HyperparameterError(f"{name}={value} must be a fraction between 0 and 1; 5 % is 0.05.")


def aurc(probs: Tensor, targets: Tensor) -> Tensor:
    """Area under the risk-coverage curve, with the largest probability as confidence and 0/1 errors as risk.

    If several examples have the same confidence, the value is the mean over all their orders.

    Args:
        probs: Class probabilities, ``[batch, classes]``.
        targets: Class indices, ``[batch]``.

    Returns:
        A scalar between 0 (no errors) and 1 (no correct predictions). At equal accuracy, lower means that errors have lower
        confidence.

    Example:
        >>> aurc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))  # risks 0 and 1/2
        tensor(0.2500)
    """
    return _aurc(*top_label(probs, targets))


def _aurc(confidence: Tensor, correct: Tensor) -> Tensor:
    error = 1 - mean_over_ties(confidence, correct)
    errors_so_far = error[confidence.argsort(descending=True)].cumsum(0)
    examples_so_far = torch.arange(1, len(error) + 1, device=error.device)
    return (errors_so_far / examples_so_far).mean()


@final
class AURC(TopLabelMetric):
    """Area under the risk-coverage curve (see `aurc`)."""

    higher_is_better = False
    measure = staticmethod(_aurc)


@final
class CoverageAtRisk(TopLabelMetric):
    """Largest fraction of inputs that can be answered at a tolerated risk (see `coverage_at_risk`).

    Args:
        risk: Tolerated fraction of errors, from 0 to 1.
        **kwargs: Passed to `torchmetrics.Metric`.
    """

    higher_is_better = True

    def __init__(self, risk: float = DEFAULT_RISK, **kwargs: Any) -> None:
        _check_fraction("risk", risk)
        super().__init__(**kwargs)
        self.risk = risk

    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        """See `StoredMetric`."""
        return _coverage_at(_curve(confidence, correct), self.risk)


@final
class RiskAtCoverage(TopLabelMetric):
    """Fraction of errors among the answers at a given coverage (see `risk_at_coverage`).

    Args:
        coverage: Fraction of the inputs to answer, from 0 to 1.
        **kwargs: Passed to `torchmetrics.Metric`.
    """

    higher_is_better = False

    def __init__(self, coverage: float = DEFAULT_COVERAGE, **kwargs: Any) -> None:
        _check_fraction("coverage", coverage)
        super().__init__(**kwargs)
        self.coverage = coverage

    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        """See `StoredMetric`."""
        return _risk_at(_curve(confidence, correct), self.coverage)
