"""Rejection with a guarantee: answer only where the model is sure enough that at most a given fraction of answers is wrong.

An input is answered if its largest probability lies above a threshold t. Of n calibration rows above t, e are wrong. Given
t, e is binomial with the risk r(t) of new answers, so that

    P(Bin(n, r*) ≤ e)

is a p-value of the hypothesis that the risk r(t) is larger than the tolerated r* (Clopper & Pearson 1934; Geifman & El-Yaniv
2017, https://arxiv.org/abs/1705.08500, bound the risk so). Thresholds are tested from the most confident rows down by fixed
sequences, each of which stops at its first p-value above δ divided by the number of sequences (Angelopoulos et al. 2021,
"Learn then Test", https://arxiv.org/abs/2110.01052). With probability at least 1 - δ over the calibration rows, the risk of
the answers is at most r*. Calibration rows must be independent draws of what comes later, and unseen in training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError
from lightning_bayes.predictive.links import Prediction

SEQUENCES = 4  # of tests


@final
@dataclass(frozen=True)
class Rejector:
    """A threshold of the confidence, above which at most a fraction `risk` of answers is wrong.

    Attributes:
        threshold: An input is answered if its largest probability is larger; 0 answers all.
        risk: r*, tolerated fraction of errors among the answers.
        confidence: 1 - δ, probability with which the risk is kept, over draws of the calibration rows.
        coverage: Fraction of the calibration rows that are answered.
        error: Fraction of errors among them.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> confidence = 0.5 + 0.5 * torch.rand(1000, generator=generator)
        >>> probs = torch.stack([confidence, 1 - confidence], 1)
        >>> labels = (torch.rand(1000, generator=generator) > confidence).long()  # right as often as it says
        >>> rejector = Rejector.fit(probs, labels, risk=0.1)
        >>> rejector.accepts(torch.tensor([[0.99, 0.01], [0.6, 0.4]]))
        tensor([ True, False])
    """

    threshold: float
    risk: float
    confidence: float
    coverage: float
    error: float

    @classmethod
    def fit(cls, probs: Tensor, labels: Tensor, risk: float, confidence: float = 0.95) -> Rejector:
        """Choose the threshold that answers most.

        Args:
            probs: Probabilities of calibration rows, ``[N, C]``, that neither training nor a choice of a model has seen.
            labels: Classes, ``[N]``.
            risk: r*, between 0 and 1.
            confidence: 1 - δ, between 0 and 1.

        Returns:
            The rejector.

        Raises:
            DataError: If no threshold keeps the risk, or there is one class.
        """
        _check(probs, labels, risk, confidence)
        certainty, predicted = probs.detach().double().cpu().max(1)
        order = certainty.argsort(descending=True)
        sorted_certainty = certainty[order]
        wrong = (predicted != labels.cpu())[order].double()
        # Threshold k is the certainty of row k, which leaves the rows strictly above it; the last one answers all.
        thresholds = torch.cat([sorted_certainty, sorted_certainty.new_zeros(1)])
        above = torch.searchsorted(-sorted_certainty, -thresholds)
        errors = torch.cat([wrong.new_zeros(1), wrong.cumsum(0)])[above]
        passed = _p_values(errors, above, risk) <= (1 - confidence) / SEQUENCES
        chosen = _last_passed(passed, fewest_rows(risk, confidence))
        if chosen is None:
            raise DataError(
                f"No threshold keeps the risk at {risk:g} with confidence {confidence:g} on {len(labels)} calibration rows, "
                f"of which {float(wrong.mean()):.1%} are wrong; it takes {fewest_rows(risk, confidence)} or more. Give more "
                "rows, tolerate a larger risk, or lower the confidence."
            )
        answered = int(above[chosen])
        return cls(
            float(thresholds[chosen]), risk, confidence, answered / len(labels), float(errors[chosen]) / answered
        )

    def accepts(self, prediction: Prediction | Tensor) -> Tensor:
        """The inputs that are answered.

        Args:
            prediction: A prediction of `mc_predict`, or its probabilities ``[B, C]``.

        Returns:
            Booleans, ``[B]``.
        """
        probs = prediction if isinstance(prediction, Tensor) else prediction.probs
        return probs.double().max(1).values > self.threshold

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for ``Rejector(**state)``."""
        return dict(self.__dict__)


def check_threshold(reject_below: float | None) -> None:
    """Require a threshold that a largest probability can pass.

    Args:
        reject_below: The threshold; None for none.

    Raises:
        HyperparameterError: If it is not a probability.
    """
    if reject_below is not None and not 0 <= reject_below <= 1:
        raise HyperparameterError(f"reject_below={reject_below} is compared with probabilities; take one from 0 to 1.")


def fewest_rows(risk: float, confidence: float = 0.95) -> int:
    """Rows without error that it takes to test a threshold: (1 - r*)^n must not exceed δ.

    Args:
        risk: r*.
        confidence: 1 - δ.

    Returns:
        n.

    Example:
        >>> fewest_rows(0.1)
        42
    """
    return math.ceil(math.log((1 - confidence) / SEQUENCES) / math.log1p(-risk))


def _p_values(errors: Tensor, rows: Tensor, risk: float) -> Tensor:
    from scipy.special import bdtr  # slow to import

    found: Tensor = torch.as_tensor(bdtr(errors.numpy(), rows.numpy(), risk))
    return found


def _last_passed(passed: Tensor, fewest: int) -> int | None:
    """The last test that a sequence reaches; sequences start at all rows, their half, their quarter and so on."""
    last, reached = len(passed) - 1, []
    for start in {max(fewest, last >> halvings) for halvings in range(SEQUENCES)}:
        failures = (~passed[start:]).nonzero()
        end = start + int(failures[0]) if len(failures) else last + 1
        reached += [end - 1] if end > start else []
    return max(reached, default=None)


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
            "The predictions have one class, so no answer is wrong. Give probabilities of two classes or more."
        )
