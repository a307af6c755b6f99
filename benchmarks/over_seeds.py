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
    error = f" ± {standard_error(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4f}{error}"
