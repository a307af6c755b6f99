"""Interleaved rounds: a busy machine slows down every method, so ratios are computed within a round.

Each round times every method once. It starts one method later than the round before, so that no method always follows the
same method. Two warm-up steps come first. A method slower than `SLOW` times the baseline, which runs first, takes part in
every fourth round; if its step takes more than `LONG` seconds, it has one warm-up step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Step = Callable[[], None]


@dataclass(frozen=True)
class MeanOfUpdates:
    """T successive updates, timed as one step of their mean duration, because only one of them measures the curvature.

    Attributes:
        update: One update.
        updates: T.
    """

    update: Step
    updates: int

    def __call__(self) -> None:
        """Run all updates."""
        for _ in range(self.updates):
            self.update()


WARM_UP = 2  # the first step creates the optimizer's state and fills the allocator
SLOW = 4.0
LONG = 1.0
FEWER = 4
MIN_ROUNDS = 3


@dataclass
class Times:
    """Seconds per step by method and round, and error messages by method."""

    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def median_seconds(self, method: str) -> float:
        """Median over the rounds of the method."""
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
        steps: Steps by method. A step that raises is recorded and removed, which frees its memory.
        rounds: Number of rounds after the warm-up.
        baseline: The method that defines which methods are slow.
        timed: A function that runs a step and returns its seconds.

    Returns:
        Seconds by method and round.
    """
    times = Times()

    def attempt(method: str) -> float | None:
        try:
            return timed(steps[method])
        except Exception as error:  # an error of a library is a result
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
    """Whether a method runs in round `r`: a slow one in a quarter of the rounds, evenly spread, and in at least three."""
    count = min(rounds, max(MIN_ROUNDS, rounds // FEWER)) if slow else rounds
    return r * count % rounds < count


def words(error: BaseException, limit: int = 200) -> str:
    """Type and message of an error in one line of about `limit` characters at most."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " …"


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def stopwatch(synchronise: Callable[[], None] = lambda: None, clock: str = "wall") -> Callable[[Step], float]:
    """Make a function that runs a step and returns its seconds; it waits for the device before and after.

    Args:
        synchronise: A function that waits for the device.
        clock: ``"wall"``, or ``"cpu"`` for the processor time of all threads of this process, which with one thread is the
            wall time on an idle machine.

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
