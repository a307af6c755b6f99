"""Schedules: hyperparameters as functions of t, the number of updates so far.

Most numeric hyperparameters of optimizers and callbacks may also be a function of t, from 0: one of these, or your own.

    LinearSchedule(start, end, steps)          start + (end - start) · min(1, t/steps)
    CosineSchedule(start, end, steps)          end + (start - end) · (1 + cos(π min(1, t/steps))) / 2
    ExponentialSchedule(start, factor, every)  start · factor^⌊t/every⌋
    PowerDecay(start, power)                   start / (1 + t^power)
    PiecewiseSchedule(values, milestones)      values[i] for milestones[i-1] ≤ t < milestones[i]

Parameter groups store only the current values, so checkpoints remain safe to load. They also store t, so a resumed run
continues its schedules.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, final

from typing_extensions import override

from lightning_bayes.errors import HyperparameterError

ValueT = TypeVar("ValueT")
BetaSchedule: TypeAlias = Callable[[int], tuple[float, float]]


class Schedule(ABC):
    """A function of the number of updates."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the value after `step` updates, from 0."""


def _require_steps(name: str, value: int) -> None:
    if value < 1 or value != int(value):
        raise HyperparameterError(f"{name}={value!r} must be a whole number of at least 1.")


@final
@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """Linear interpolation from `start` to `end` over `steps` updates, then constant at `end`.

    Example:
        >>> warmup = LinearSchedule(0.1, 1.0, steps=10)
        >>> warmup(0), warmup(5), warmup(100)
        (0.1, 0.55, 1.0)
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _require_steps("steps", self.steps)

    @override
    def __call__(self, step: int) -> float:
        done = min(1.0, step / self.steps)
        return self.start * (1 - done) + self.end * done


@final
@dataclass(frozen=True)
class CosineSchedule(Schedule):
    """Half a cosine wave from `start` to `end` over `steps` updates, then constant at `end`.

    Example:
        >>> round(CosineSchedule(1.0, 0.0, steps=10)(5), 4)
        0.5
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        _require_steps("steps", self.steps)

    @override
    def __call__(self, step: int) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * min(1.0, step / self.steps))) / 2


@final
@dataclass(frozen=True)
class ExponentialSchedule(Schedule):
    """Exponential decay or growth: `start`, multiplied by `factor` every `every` updates.

    Example:
        >>> ExponentialSchedule(1.0, factor=0.5, every=100)(250)
        0.25
    """

    start: float
    factor: float
    every: int = 1

    def __post_init__(self) -> None:
        _require_steps("every", self.every)

    @override
    def __call__(self, step: int) -> float:
        return self.start * float(self.factor) ** (step // self.every)


@final
@dataclass(frozen=True)
class PowerDecay(Schedule):
    """``start / (1 + t^power)`` after t updates; Khan et al. 2018, eq. 104.

    Example:
        >>> PowerDecay(0.1, power=0.55)(1)
        0.05
    """

    start: float
    power: float

    @override
    def __call__(self, step: int) -> float:
        return self.start / (1 + math.pow(step, self.power))


@final
@dataclass(frozen=True)
class PiecewiseSchedule(Schedule):
    """Constant between milestones: ``values[i]`` until update ``milestones[i]``.

    Example:
        >>> noise = PiecewiseSchedule([0.01, 1.0], milestones=[500])  # almost no noise at first
        >>> noise(499), noise(500)
        (0.01, 1.0)
    """

    values: Sequence[float]
    milestones: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.milestones) + 1 or sorted(self.milestones) != list(self.milestones):
            raise HyperparameterError(
                f"values={list(self.values)} and milestones={list(self.milestones)} do not match. Pass ascending "
                "milestones and one more value than milestones."
            )

    @override
    def __call__(self, step: int) -> float:
        return float(self.values[bisect_right(list(self.milestones), step)])


def value_at(value: ValueT | Callable[[int], ValueT], step: int) -> ValueT:
    """Evaluate `value` at `step` if it is a function of the step; otherwise return it unchanged."""
    return value(step) if callable(value) else value
