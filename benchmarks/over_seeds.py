"""Statistics of a score over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


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
