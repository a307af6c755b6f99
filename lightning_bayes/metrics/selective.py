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
from typing_extensions import override

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics.top_label import TopLabelMetric, mean_over_ties

DEFAULT_RISK = 0.05
DEFAULT_COVERAGE = 0.8


class RiskCoverage(NamedTuple):
    """The risk-coverage curve, with one point per distinct confidence as the threshold, ``[points]`` each."""

    coverage: Tensor  # fraction of examples at or above the threshold, in increasing order; the last one is 1
    risk: Tensor  # fraction of errors among these examples


def risk_coverage(confidence: Tensor, correct: Tensor) -> RiskCoverage:
    """Risk against coverage for every threshold of the confidence; both arguments are ``[batch]``."""
    distinct, group, count = torch.unique(confidence, return_inverse=True, return_counts=True)
    errors = torch.zeros_like(distinct).index_add_(0, group, 1 - correct)
    answered = count.flip(0).cumsum(0)
    return RiskCoverage(answered / len(confidence), errors.flip(0).cumsum(0) / answered)


def _undefined(curve: RiskCoverage) -> Tensor:
    return curve.risk.new_full((), torch.nan)


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise HyperparameterError(f"{name}={value} must be a fraction between 0 and 1; 5 % is 0.05.")


def aurc(confidence: Tensor, correct: Tensor) -> Tensor:
    """Area under the risk-coverage curve; examples with the same confidence count as the mean over all their orders."""
    error = 1 - mean_over_ties(confidence, correct)
    errors_so_far = error[confidence.argsort(descending=True)].cumsum(0)
    examples_so_far = torch.arange(1, len(error) + 1, device=error.device)
    return (errors_so_far / examples_so_far).mean()


@final
class AURC(TopLabelMetric):
    """Area under the risk-coverage curve, from 0 without errors to 1; low if errors have low confidence."""

    higher_is_better = False
    measure = staticmethod(aurc)


@final
class CoverageAtRisk(TopLabelMetric):
    """Largest fraction of inputs that can be answered with at most a fraction `risk` of errors; 0 if no threshold does."""

    higher_is_better = True

    def __init__(self, risk: float = DEFAULT_RISK, **kwargs: Any) -> None:
        _check_fraction("risk", risk)
        super().__init__(**kwargs)
        self.risk = risk

    @override
    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        curve = risk_coverage(confidence, correct)
        return (curve.coverage * (curve.risk <= self.risk)).max() if len(curve.risk) else _undefined(curve)


@final
class RiskAtCoverage(TopLabelMetric):
    """Fraction of errors among the answers if at least a fraction `coverage` is answered, the most confident first."""

    higher_is_better = False

    def __init__(self, coverage: float = DEFAULT_COVERAGE, **kwargs: Any) -> None:
        _check_fraction("coverage", coverage)
        super().__init__(**kwargs)
        self.coverage = coverage

    @override
    def measure(self, confidence: Tensor, correct: Tensor) -> Tensor:
        curve = risk_coverage(confidence, correct)
        return curve.risk[curve.coverage >= self.coverage][0] if len(curve.risk) else _undefined(curve)
