"""Interleaved rounds: a busy machine slows every method, so ratios are taken within a round.

Each round visits every method once and starts one method later than the round before, so that no method always follows
the same one. Two steps of warm-up come before. A method slower than `SLOW` times the baseline, which comes first, takes part
in every fourth round, and if its step takes more than `LONG` seconds, one step of warm-up is enough.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Step = Callable[[], None]


@dataclass(frozen=True)
class MeanOfUpdates:
    """Updates in a row that count as one step of their mean duration, because only one of them measures the curvature.

    Attributes:
        update: One update.
        updates: T.
    """

    update: Step
    updates: int

    def __call__(self) -> None:
        """Take all of them."""
        for _ in range(self.updates):
            self.update()


WARM_UP = 2  # the second finds the optimizer's state and the allocator's pages
SLOW = 4.0
LONG = 1.0
FEWER = 4
AT_LEAST = 3


@dataclass
class Times:
    """Seconds per step by method and round, and what went wrong."""

    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def median_seconds(self, method: str) -> float:
        """Median over the rounds that the method took part in."""
        return statistics.median(self.seconds[method].values())

    def median_ratio(self, method: str, baseline: str) -> float | None:
        """Median over rounds of the ratio to the baseline **in the same round**; None if the baseline failed."""
        ratios = self._ratios(method, baseline)
        return statistics.median(ratios) if ratios else None

    def ratio_quartiles(self, method: str, baseline: str) -> list[float] | None:
        """First and third quartile of the same ratios; None for fewer than two."""
        ratios = self._ratios(method, baseline)
        return None if len(ratios) < 2 else statistics.quantiles(ratios, n=4, method="inclusive")[::2]

    def _ratios(self, method: str, baseline: str) -> list[float]:
        other = self.seconds.get(baseline, {})
        return [seconds / other[r] for r, seconds in self.seconds[method].items() if r in other]


def interleave(steps: dict[str, Step], rounds: int, baseline: str, timed: Callable[[Step], float]) -> Times:
    """Time steps in turn.

    Args:
        steps: By method; one that raises is reported and taken out, so that its memory is free.
        rounds: Number of rounds after the warm-up.
        baseline: The method that decides which ones are slow.
        timed: Runs a step and returns its seconds.

    Returns:
        Seconds by method and round.
    """
    times = Times()

    def attempt(method: str) -> float | None:
        try:
            return timed(steps[method])
        except Exception as error:  # whatever a library raises is a finding
            times.failures[method] = words(error)
            times.seconds.pop(method, None)
            del steps[method]
            return None

    warm: dict[str, float] = {}

    def slow(method: str) -> bool:
        return warm[method] > SLOW * warm.get(baseline, float("inf"))

    for method in list(steps):
        for _ in range(WARM_UP):
            if method in steps and not (warm.get(method, 0.0) > LONG and slow(method)):
                seconds = attempt(method)
                if seconds is not None:
                    warm[method] = seconds
    for r in range(rounds):
        for method in _order(list(steps), r):
            if takes_part(r, rounds, slow(method)) and (seconds := attempt(method)) is not None:
                times.seconds.setdefault(method, {})[r] = seconds
    return times


def _order(methods: list[str], r: int) -> list[str]:
    start = r % max(1, len(methods))
    return methods[start:] + methods[:start]


def takes_part(r: int, rounds: int, slow: bool) -> bool:
    """Whether a method is due in round `r`: slow ones in a quarter of the rounds, evenly spread, but in at least three."""
    share = min(rounds, max(AT_LEAST, rounds // FEWER)) if slow else rounds
    return r * share % rounds < share


def words(error: BaseException, limit: int = 200) -> str:
    """Type and message of an error in one line of at most about `limit` characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " …"


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def stopwatch(synchronise: Callable[[], None] = lambda: None, clock: str = "wall") -> Callable[[Step], float]:
    """Make a function that runs a step and returns its seconds, waiting for the device before and after.

    Args:
        synchronise: Waits for the device.
        clock: ``"wall"``, or ``"cpu"`` for the processor time of this process, all threads together: with one thread it is
            what the wall clock would show on an idle machine.

    Returns:
        The function.
    """

    def timed(step: Step) -> float:
        synchronise()
        start = CLOCKS[clock]()
        step()
        synchronise()
        seconds = CLOCKS[clock]() - start
        return seconds / step.updates if isinstance(step, MeanOfUpdates) else seconds

    return timed
