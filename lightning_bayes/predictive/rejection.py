"""Rejection with a guarantee: reject uncertain inputs so that at most a given fraction of the answers is wrong.

An input is answered if its largest probability is above a threshold t. Of n calibration rows above t, e are wrong. Given t
and n, e is binomial with the risk r(t) of new answers. Hence

    P(Bin(n, r*) ≤ e)

is a p-value for the null hypothesis that r(t) exceeds the tolerated risk r* (Clopper & Pearson 1934; Geifman & El-Yaniv
2017, https://arxiv.org/abs/1705.08500, bound the risk in this way). Thresholds are tested from the most confident rows down,
by fixed-sequence tests. Each sequence stops at its first p-value above δ divided by the number of sequences (Angelopoulos et
al. 2021, "Learn then Test", https://arxiv.org/abs/2110.01052). With probability at least 1 - δ over the calibration rows,
the risk of the answers is at most r*. Calibration rows must be independent draws from the distribution of the new inputs and
not used in training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError
from lightning_bayes.likelihood import Prediction

SEQUENCES = 4  # number of fixed-sequence tests


@final
@dataclass(frozen=True)
class Rejector:
    """A confidence threshold above which at most a fraction `risk` of the answers is wrong.

    Attributes:
        threshold: An input is answered if its largest probability is above the threshold; 0 answers all inputs.
        risk: r*, tolerated fraction of errors among the answers.
        confidence: 1 - δ, probability over calibration rows that the risk is at most r*.
        coverage: Fraction of the calibration rows that are answered.
        error: Fraction of errors among the answered calibration rows.
    """

    threshold: float
    risk: float
    confidence: float
    coverage: float
    error: float

    @classmethod
    def fit(cls, probs: Tensor, labels: Tensor, risk: float, confidence: float = 0.95) -> Rejector:
        """Choose the threshold with the largest coverage.

        Args:
            probs: Probabilities of calibration rows, ``[N, C]``, that were used neither in training nor in model selection.
            labels: Class indices, ``[N]``.
            risk: r*, between 0 and 1.
            confidence: 1 - δ, between 0 and 1.

        Returns:
            The rejector.

        Raises:
            DataError: If no threshold guarantees the risk, or there is only one class.
        """
        _check(probs, labels, risk, confidence)
        certainty, predicted = probs.detach().double().cpu().max(1)
        order = certainty.argsort(descending=True)
        sorted_certainty = certainty[order]
        wrong = (predicted != labels.cpu())[order].double()
        # Threshold k is the certainty of row k, which answers the rows strictly above it; the last one answers all rows.
        thresholds = torch.cat([sorted_certainty, sorted_certainty.new_zeros(1)])
        answered = torch.searchsorted(-sorted_certainty, -thresholds)
        errors = torch.cat([wrong.new_zeros(1), wrong.cumsum(0)])[answered]
        passed = _p_values(errors, answered, risk) <= (1 - confidence) / SEQUENCES
        required_rows = fewest_rows(risk, confidence)
        index = _last_passed(passed, required_rows)
        if index is None:
            raise DataError(
                f"No threshold guarantees a risk of {risk:g} with confidence {confidence:g} on {len(labels)} calibration "
                f"rows, of which {float(wrong.mean()):.1%} are wrong; at least {required_rows} rows are needed. Pass more "
                "rows, tolerate a larger risk, or lower the confidence."
            )
        count = int(answered[index])
        return cls(float(thresholds[index]), risk, confidence, count / len(labels), float(errors[index]) / count)

    def accepts(self, prediction: Prediction | Tensor) -> Tensor:
        """Return whether each input is answered, ``[B]``, from a prediction of `mc_predict` or probabilities ``[B, C]``."""
        probs = prediction if isinstance(prediction, Tensor) else prediction.probs
        return probs.double().max(1).values > self.threshold

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for ``Rejector(**state)``."""
        return dict(self.__dict__)


def check_threshold(reject_below: float | None) -> None:
    """Raise a `HyperparameterError` unless the threshold is None or between 0 and 1."""
    if reject_below is not None and not 0 <= reject_below <= 1:
        raise HyperparameterError(f"reject_below={reject_below} is a threshold on probabilities; use 0 to 1.")


def fewest_rows(risk: float, confidence: float = 0.95) -> int:
    """The number n of calibration rows that a threshold needs if none is wrong: (1 - r*)^n ≤ δ / sequences."""
    return math.ceil(math.log((1 - confidence) / SEQUENCES) / math.log1p(-risk))


def _p_values(errors: Tensor, rows: Tensor, risk: float) -> Tensor:
    from scipy.special import bdtr  # slow to import

    values: Tensor = torch.as_tensor(bdtr(errors.numpy(), rows.numpy(), risk))
    return values


def _last_passed(passed: Tensor, fewest: int) -> int | None:
    """The last test that any sequence passes. Sequences start at all rows, half of them, a quarter and so on."""
    last = len(passed) - 1
    last_passed = []
    for start in {max(fewest, last >> halvings) for halvings in range(SEQUENCES)}:
        failures = (~passed[start:]).nonzero()
        end = start + int(failures[0]) if len(failures) else last + 1
        if end > start:
            last_passed.append(end - 1)
    return max(last_passed, default=None)


def _check(probs: Tensor, labels: Tensor, risk: float, confidence: float) -> None:
    if probs.dim() != 2 or labels.shape != probs.shape[:1] or len(labels) == 0:
        raise ShapeError(
            f"probs has shape {tuple(probs.shape)} and labels {tuple(labels.shape)}; expected [rows, classes] and [rows]."
        )
    if not (0 < risk < 1 and 0 < confidence < 1):
        raise HyperparameterError(
            f"risk={risk} and confidence={confidence} must lie between 0 and 1; a risk of 5 % is 0.05."
        )
    if probs.shape[1] < 2:
        raise DataError(
            "The predictions have one class, so no answer is wrong. Pass probabilities of at least two classes."
        )
