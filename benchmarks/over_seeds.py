"""Statistics of a score over seeds, and the table of methods that share seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def mean_and_error(values: Sequence[float], sign: str = "") -> str:
    """Format the mean ± its standard error."""
    return with_error(statistics.mean(values), standard_error(values), sign=sign)


def with_error(mean: float, error: float, digits: int = 4, sign: str = "") -> str:
    """Format a mean ± its standard error."""
    if math.isnan(mean):
        return "–"
    text = f"{mean:{sign}.{digits}f}"
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


Record = Mapping[str, Any]


def paired_table(records: Sequence[Record], columns: Sequence[str], base: str, differences: Sequence[str]) -> str:
    """Means of each problem's methods and, paired over seeds, some columns minus those of the method `base`; in Markdown."""
    groups: dict[tuple[str, str], dict[int, Record]] = {}
    for record in records:
        groups.setdefault((record.get("problem", ""), record["method"]), {})[record["seed"]] = record
    head = ["problem", "method", "seeds", *columns, *(f"{name} - that of {base}" for name in differences)]
    lines = [head, ["---"] * len(head)]
    for (problem, method), of in groups.items():
        means = [_mean([record[name] for record in of.values() if name in record]) for name in columns]
        against = groups.get((problem, base), {})
        # An ensemble is compared with the mean of the networks of its decade of seeds.
        decade = 10 if method.startswith("ensemble") else 1
        changes = [_changes(of, against, name, decade) for name in differences]
        lines.append([problem, method, str(len(of)), *means, *(mean_and_error(c, "+") if c else "–" for c in changes)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean(values: Sequence[float]) -> str:
    return with_error(statistics.mean(values), math.nan) if values else "–"


def _changes(of: Mapping[int, Record], base: Mapping[int, Record], name: str, decade: int) -> list[float]:
    others = {seed: [b[name] for s, b in base.items() if s // decade == seed // decade] for seed in of}
    return [of[seed][name] - statistics.mean(values) for seed, values in others.items() if values]
