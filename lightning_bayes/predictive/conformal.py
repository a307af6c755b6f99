"""Conformal sets and intervals: they contain the truth with at least a given probability, even under a poor model.

A nonconformity score s(x, y) measures how badly y fits x. Let q be the ⌈(n + 1) c⌉-th smallest score of n calibration rows.
The set {y : s(x, y) ≤ q} contains the label of a new row with probability at least c, and at most c + 1/(n + 1) if scores
have no ties (Vovk et al. 2005). Calibration rows must be exchangeable with new rows and not used in training.

    THR     1 - p_y                                              Sadinle et al. 2019, https://arxiv.org/abs/1609.00451
    APS     Σ_{c: p_c > p_y} p_c + u p_y,    u ~ U(0, 1)         Romano et al. 2020, https://arxiv.org/abs/2006.02544
    RAPS    APS + λ max(0, rank(y) - k)                          Angelopoulos et al. 2021, https://arxiv.org/abs/2009.14193
    CQR     max(lower(x) - y, y - upper(x))                      Romano et al. 2019, https://arxiv.org/abs/1905.03222

The guarantee is marginal: it holds on average over all inputs, not for each class or each input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from torch import Generator, Tensor

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError

SetScore: TypeAlias = Literal["thr", "aps", "raps"]


def thr_scores(probs: Tensor) -> Tensor:
    """THR scores, 1 - p of every class, which give the smallest sets on average.

    Args:
        probs: ``[B, C]``.

    Returns:
        ``[B, C]``.

    Example:
        >>> thr_scores(torch.tensor([[0.75, 0.25]]))
        tensor([[0.2500, 0.7500]])
    """
    return 1 - probs


def aps_scores(probs: Tensor, uniform: Tensor) -> Tensor:
    """APS scores: the total probability of more likely classes plus u times that class's probability.

    Harder inputs get larger sets.

    Args:
        probs: ``[B, C]``.
        uniform: u of every row, ``[B]``, in [0, 1]. u = 1 gives conservative sets.

    Returns:
        ``[B, C]``.

    Example:
        >>> aps_scores(torch.tensor([[0.75, 0.25]]), torch.tensor([0.5]))
        tensor([[0.3750, 0.8750]])
    """
    sorted_probs, order = probs.sort(dim=1, descending=True, stable=True)
    more_likely = sorted_probs.cumsum(1) - sorted_probs
    return torch.empty_like(probs).scatter_(1, order, more_likely + uniform[:, None] * sorted_probs)


def raps_scores(probs: Tensor, uniform: Tensor, *, penalty: float = 0.01, free: int = 5) -> Tensor:
    """RAPS scores: APS with a penalty on low-ranked classes, which keeps sets over many classes small.

    Args:
        probs: ``[B, C]``.
        uniform: u of every row, ``[B]``.
        penalty: λ, at least 0.
        free: k, the number of ranks without penalty. The most likely class has rank 1.

    Returns:
        ``[B, C]``.

    Example:
        >>> raps_scores(torch.tensor([[0.75, 0.25]]), torch.tensor([0.5]), penalty=1.0, free=1)
        tensor([[0.3750, 1.8750]])
    """
    ranks = probs.argsort(dim=1, descending=True, stable=True).argsort(dim=1) + 1
    return aps_scores(probs, uniform) + penalty * (ranks - free).clamp_min(0)


def conformal_quantile(scores: Tensor, coverage: float) -> float:
    """The threshold q, which is the ⌈(n + 1) c⌉-th smallest score, or infinite if n is too small.

    Args:
        scores: Scores of the true values of the calibration rows, ``[n]``.
        coverage: c, between 0 and 1.

    Returns:
        The largest score that belongs to a set.

    Raises:
        HyperparameterError: If the coverage is out of range.
        DataError: If there are no rows.

    Example:
        >>> conformal_quantile(torch.arange(9.0), coverage=0.9)
        8.0
    """
    if not 0 < coverage < 1:
        raise HyperparameterError(f"coverage={coverage} must lie between 0 and 1; 90 % is 0.9.")
    if len(scores) == 0:
        raise DataError("There are no calibration rows. Pass 1/(1 - coverage) or more that were not used in training.")
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)  # rounding errors must not increase the rank
    return float(scores.double().kthvalue(rank).values) if rank <= len(scores) else math.inf


@final
@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes that contain the true class with a given probability.

    Attributes:
        quantile: q.
        coverage: c.
        score: ``"thr"``, ``"aps"`` or ``"raps"``.
        penalty: λ of RAPS.
        free: k of RAPS.

    Example:
        >>> probs = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.4, 0.3], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]])
        >>> fitted = ConformalSets.fit(probs, torch.tensor([0, 1, 2, 1]), coverage=0.75, score="thr")
        >>> fitted.sets(torch.tensor([[0.45, 0.35, 0.2]]))
        tensor([[ True,  True, False]])
    """

    quantile: float
    coverage: float
    score: SetScore = "aps"
    penalty: float = 0.01
    free: int = 5

    @classmethod
    def fit(
        cls,
        probs: Tensor,
        labels: Tensor,
        coverage: float = 0.9,
        *,
        score: SetScore = "aps",
        penalty: float = 0.01,
        free: int = 5,
        generator: Generator | None = None,
    ) -> ConformalSets:
        """Calibrate the threshold.

        Args:
            probs: Probabilities of calibration rows that were not used in training, ``[N, C]``.
            labels: Class indices, ``[N]``.
            coverage: c.
            score: ``"thr"``, ``"aps"`` or ``"raps"``.
            penalty: λ of RAPS. Tune λ and k on separate rows.
            free: k of RAPS.
            generator: Generator of u, on the CPU; the global one by default.

        Returns:
            The calibrated sets.

        Raises:
            HyperparameterError: If the score is unknown.
            ShapeError: If the shapes of probabilities and labels do not match.
        """
        if score not in {"thr", "aps", "raps"}:
            raise HyperparameterError(f"score={score!r} is unknown; use 'thr', 'aps' or 'raps'.")
        if probs.dim() != 2 or labels.shape != probs.shape[:1]:
            raise ShapeError(
                f"probs has shape {tuple(probs.shape)} and labels {tuple(labels.shape)}; expected [rows, classes], [rows]."
            )
        uncalibrated = cls(math.inf, coverage, score, penalty, free)
        true_scores = uncalibrated.scores(probs, generator).gather(1, labels[:, None].long())[:, 0]
        return cls(conformal_quantile(true_scores, coverage), coverage, score, penalty, free)

    def scores(self, probs: Tensor, generator: Generator | None = None) -> Tensor:
        """Return the scores of all classes, ``[B, C]``; raises `DataError` if there is only one class."""
        if probs.shape[1] < 2:
            raise DataError("The predictions have one class, which every set contains. Pass at least two classes.")
        if self.score == "thr":
            return thr_scores(probs)
        uniform = torch.rand(len(probs), generator=generator).to(probs)
        if self.score == "aps":
            return aps_scores(probs, uniform)
        return raps_scores(probs, uniform, penalty=self.penalty, free=self.free)

    def sets(self, probs: Tensor, generator: Generator | None = None) -> Tensor:
        """Predict the set of every input. A set may be empty.

        Args:
            probs: ``[B, C]``.
            generator: Generator of u for APS and RAPS, on the CPU; the global one by default.

        Returns:
            Whether each class is in the set, ``[B, C]``.
        """
        return self.scores(probs, generator) <= self.quantile


class Intervals(NamedTuple):
    """Lower and upper ends, ``[B, …]`` each."""

    lower: Tensor
    upper: Tensor


@final
@dataclass(frozen=True)
class ConformalIntervals:
    """Predicted intervals, widened or narrowed so that they contain the truth with a given probability (CQR).

    Attributes:
        quantile: q, in the unit of the target, by which an interval grows at both ends.
        coverage: c.

    Example:
        >>> lower, upper, truth = torch.zeros(9), torch.ones(9), torch.linspace(0.5, 2.5, 9)
        >>> fitted = ConformalIntervals.fit(lower, upper, truth, coverage=0.5)
        >>> fitted.intervals(torch.tensor([0.0]), torch.tensor([1.0]))
        Intervals(lower=tensor([-0.5000]), upper=tensor([1.5000]))
    """

    quantile: float
    coverage: float

    @classmethod
    def fit(cls, lower: Tensor, upper: Tensor, targets: Tensor, coverage: float = 0.9) -> ConformalIntervals:
        """Calibrate the intervals.

        Args:
            lower: Lower ends for calibration rows, such as quantiles of the predictive samples or mean - 1.64 std, ``[N]``.
            upper: Upper ends, ``[N]``.
            targets: ``[N]``.
            coverage: c.

        Returns:
            The calibrated intervals.

        Raises:
            ShapeError: If the shapes differ.
        """
        if not lower.shape == upper.shape == targets.shape or targets.dim() != 1:
            raise ShapeError(
                f"lower, upper and targets have shapes {tuple(lower.shape)}, {tuple(upper.shape)} and "
                f"{tuple(targets.shape)}; expected [rows] each."
            )
        return cls(conformal_quantile(torch.maximum(lower - targets, targets - upper), coverage), coverage)

    def intervals(self, lower: Tensor, upper: Tensor) -> Intervals:
        """Adjust predicted intervals.

        Args:
            lower: Lower ends for new inputs.
            upper: Upper ends for new inputs.

        Returns:
            Both ends. If narrowing would make them cross, both are the middle of the interval.
        """
        middle = (lower + upper) / 2
        return Intervals(torch.minimum(lower - self.quantile, middle), torch.maximum(upper + self.quantile, middle))
