"""Conformal sets and intervals: they contain the truth in at least a given fraction of cases, whatever the model is worth.

A score s(x, y) says how badly y fits x. With q the ⌈(n + 1) c⌉-th smallest score of n calibration rows, the set
{y : s(x, y) ≤ q} contains the label of a new row with probability at least c, and at most c + 1/(n + 1) where scores have no
ties (Vovk et al. 2005). Calibration rows must be exchangeable with what comes later, and unseen in training.

    THR     1 - p_y                                              Sadinle et al. 2019, https://arxiv.org/abs/1609.00451
    APS     Σ_{c: p_c > p_y} p_c + u p_y,    u ~ U(0, 1)         Romano et al. 2020, https://arxiv.org/abs/2006.02544
    RAPS    APS + λ max(0, rank(y) - k)                          Angelopoulos et al. 2021, https://arxiv.org/abs/2009.14193
    CQR     max(lower(x) - y, y - upper(x))                      Romano et al. 2019, https://arxiv.org/abs/1905.03222

The guarantee is on average over all inputs, not for each class or each input.
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
    """1 - p of every class: the smallest sets on average.

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
    """Probability of the more likely classes, and a random part of the class's own: sets that grow with the difficulty.

    Args:
        probs: ``[B, C]``.
        uniform: u of every row, ``[B]``, in [0, 1]; all 1 gives sets that contain the truth more often than asked.

    Returns:
        ``[B, C]``.

    Example:
        >>> aps_scores(torch.tensor([[0.75, 0.25]]), torch.tensor([0.5]))
        tensor([[0.3750, 0.8750]])
    """
    values, order = probs.sort(dim=1, descending=True, stable=True)
    before = values.cumsum(1) - values
    return torch.empty_like(probs).scatter_(1, order, before + uniform[:, None] * values)


def raps_scores(probs: Tensor, uniform: Tensor, *, penalty: float = 0.01, free: int = 5) -> Tensor:
    """APS with a penalty on classes far down the ranking, which makes sets over many classes smaller.

    Args:
        probs: ``[B, C]``.
        uniform: u of every row, ``[B]``.
        penalty: λ, at least 0.
        free: k, ranks without penalty; the most likely class has rank 1.

    Returns:
        ``[B, C]``.

    Example:
        >>> raps_scores(torch.tensor([[0.75, 0.25]]), torch.tensor([0.5]), penalty=1.0, free=1)
        tensor([[0.3750, 1.8750]])
    """
    ranks = probs.argsort(dim=1, descending=True, stable=True).argsort(dim=1) + 1
    return aps_scores(probs, uniform) + penalty * (ranks - free).clamp_min(0)


def conformal_quantile(scores: Tensor, coverage: float) -> float:
    """q: the ⌈(n + 1) c⌉-th smallest score, infinite if there are too few.

    Args:
        scores: The scores of the calibration rows' true values, ``[n]``.
        coverage: c, between 0 and 1.

    Returns:
        The score up to which values belong to a set.

    Raises:
        HyperparameterError: If the coverage is out of range.
        DataError: If there is no row.

    Example:
        >>> conformal_quantile(torch.arange(9.0), coverage=0.9)
        8.0
    """
    if not 0 < coverage < 1:
        raise HyperparameterError(f"coverage={coverage} must lie between 0 and 1; 90 % is 0.9.")
    if len(scores) == 0:
        raise DataError("There is no calibration row. Give some that training has not seen: 1/(1 - coverage) or more.")
    rank = math.ceil((len(scores) + 1) * coverage - 1e-9)  # 10 * 0.9 is no more than 9
    return float(scores.double().kthvalue(rank).values) if rank <= len(scores) else math.inf


@final
@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes that contain the true one with a given probability.

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
        """Calibrate.

        Args:
            probs: Probabilities of calibration rows that training has not seen, ``[N, C]``.
            labels: Classes, ``[N]``.
            coverage: c.
            score: Which score.
            penalty: λ of RAPS. Choose it and k on other rows than these.
            free: k of RAPS.
            generator: Source of u, on the CPU; the global one by default.

        Returns:
            The sets' rule.

        Raises:
            HyperparameterError: If the score is unknown.
            ShapeError: If labels do not fit.
        """
        if score not in {"thr", "aps", "raps"}:
            raise HyperparameterError(f"score={score!r} is unknown; use 'thr', 'aps' or 'raps'.")
        if probs.dim() != 2 or labels.shape != probs.shape[:1]:
            raise ShapeError(
                f"probs has shape {tuple(probs.shape)} and labels {tuple(labels.shape)}; expected [rows, classes], [rows]."
            )
        rule = cls(math.inf, coverage, score, penalty, free)
        truth = rule.scores(probs, generator).gather(1, labels[:, None].long())[:, 0]
        return cls(conformal_quantile(truth, coverage), coverage, score, penalty, free)

    def scores(self, probs: Tensor, generator: Generator | None = None) -> Tensor:
        """Scores of all classes.

        Args:
            probs: ``[B, C]``.
            generator: Source of u.

        Returns:
            ``[B, C]``.

        Raises:
            DataError: If there is one class.
        """
        if probs.shape[1] < 2:
            raise DataError("The predictions have one class, which every set contains. Give two classes or more.")
        if self.score == "thr":
            return thr_scores(probs)
        uniform = torch.rand(len(probs), generator=generator).to(probs)
        if self.score == "aps":
            return aps_scores(probs, uniform)
        return raps_scores(probs, uniform, penalty=self.penalty, free=self.free)

    def sets(self, probs: Tensor, generator: Generator | None = None) -> Tensor:
        """The set of every input. APS and RAPS draw; a set may be empty.

        Args:
            probs: ``[B, C]``.
            generator: Source of u, on the CPU; the global one by default.

        Returns:
            Whether a class is in the set, ``[B, C]``.
        """
        return self.scores(probs, generator) <= self.quantile


class Intervals(NamedTuple):
    """Lower and upper ends, ``[B, …]`` each."""

    lower: Tensor
    upper: Tensor


@final
@dataclass(frozen=True)
class ConformalIntervals:
    """Intervals around a prediction's own, widened or narrowed until they contain the truth with a given probability (CQR).

    Attributes:
        quantile: q, in the target's units; an interval grows by it at both ends.
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
        """Calibrate.

        Args:
            lower: Lower ends for calibration rows, such as quantiles of the predictive samples or mean - 1.64 std, ``[N]``.
            upper: Upper ends, ``[N]``.
            targets: ``[N]``.
            coverage: c.

        Returns:
            The intervals' rule.

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
        """The intervals of new inputs.

        Args:
            lower: As in `fit`.
            upper: As in `fit`.

        Returns:
            Both ends; where the interval would be narrower than nothing, both are its middle.
        """
        middle = (lower + upper) / 2
        return Intervals(torch.minimum(lower - self.quantile, middle), torch.maximum(upper + self.quantile, middle))
