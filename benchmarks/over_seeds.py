"""Statistics of a score over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def mean_and_error(values: Sequence[float], sign: str = "") -> str:
    """Format the mean ± its standard error.

    Args:
        values: One value per seed, at least one.
        sign: ``"+"`` for differences, to always print the sign.

    Returns:
        Text with four decimals; a single value has no standard error.

    Example:
        >>> mean_and_error([0.5, 0.7]), mean_and_error([0.25], "+")
        ('0.6000 ± 0.1000', '+0.2500')
    """
    return with_error(statistics.mean(values), standard_error(values), sign=sign)


def with_error(mean: float, error: float, digits: int = 4, sign: str = "") -> str:
    """Format a mean ± its standard error.

    Args:
        mean: The mean; NaN if a run diverged.
        error: Its standard error; NaN for a single run, which has none.
        digits: Decimals.
        sign: ``"+"`` for differences, to always print the sign.

    Returns:
        The text, without ``±`` if the error is unknown; a dash if the mean is.

    Example:
        >>> with_error(0.5, 0.1, digits=2), with_error(0.5, math.nan), with_error(math.nan, math.nan)
        ('0.50 ± 0.10', '0.5000', '–')
    """
    if math.isnan(mean):
        return "–"
    text = f"{mean:{sign}.{digits}f}"
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"
