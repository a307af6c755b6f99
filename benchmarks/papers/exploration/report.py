"""The table of results and published values, and the differences that exceed their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, TypeAlias

from benchmarks.over_seeds import standard_error, with_error
from benchmarks.papers.exploration.explorers import METHODS
from benchmarks.papers.exploration.published import BOTH_SETS

Results: TypeAlias = Mapping[str, Mapping[str, Any]]  # method: steps, returns [tests][seeds], noise


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean over seeds and its standard error; ``nan`` for the error of one seed."""
    return statistics.fmean(values), standard_error(values)


def so_far(returns: list[list[float]]) -> list[float]:
    """The mean over all tests, per seed."""
    return [statistics.fmean(of_seed) for of_seed in zip(*returns, strict=True)]


def table(results: Results) -> str:
    """Format a Markdown table: the last test, the mean over all tests, and the last test of every seed."""
    lines = [
        "| method | last test | mean of all tests | σ | last test of each seed | published, 300k | 3M |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for name, result in results.items():
        last, published = result["returns"][-1], [_format(*pair) for pair in BOTH_SETS[name]]
        means = [_format(*mean_and_error(values)) for values in (last, so_far(result["returns"]))]
        seeds = ", ".join(f"{value:.0f}" for value in last)
        cells = [METHODS[name].title, *means, f"{result['noise'][-1]:.4f}", seeds, *published]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format(mean: float, error: float) -> str:
    return with_error(mean, error, digits=0)


def orders(results: Results) -> Iterator[str]:
    """One line per pair of methods whose last tests, or means of all tests, are two combined standard errors apart."""
    if any(len(result["returns"][-1]) == 1 for result in results.values()):
        yield "the standard errors are unknown, because a method has one seed"
        return
    count = 0
    for title, values_of in (
        ("last test", lambda r: r["returns"][-1]),
        ("mean of all tests", lambda r: so_far(r["returns"])),
    ):
        for first, second in combinations(results, 2):
            pair = sorted((first, second), key=lambda name: -statistics.fmean(values_of(results[name])))
            (better, of_better), (worse, of_worse) = (mean_and_error(values_of(results[name])) for name in pair)
            if better - worse > 2 * math.hypot(of_better, of_worse):
                count += 1
                yield f"{title}: {METHODS[pair[0]].title} is above {METHODS[pair[1]].title}, by {better - worse:.0f}"
    if not count:
        yield "no two methods are two combined standard errors apart"
