"""The promises about a callback without arguments, for each problem and user's optimizer.

no run diverges or stays at chance
accuracy: at most one point lower;  RMSE: at most 5 % higher          mean over seeds
NLL and calibration error: not higher by more than two standard errors of the paired difference
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

Run = Mapping[str, float]  # scores of one seed


def failures(method: Sequence[Run], user: Sequence[Run], is_regression: bool, chance: float) -> list[str]:
    """Which promises are broken, in words.

    Args:
        method: Scores of the callback, one mapping per seed.
        user: Scores of the user's optimizer alone, seeds in the same order.
        is_regression: Whether errors are RMSE.
        chance: Error of knowing nothing.

    Returns:
        A word per broken promise.
    """
    broken = []
    if any(not math.isfinite(run["nll"]) or run["error"] >= 0.95 * chance for run in method):
        broken.append("chance")
    error, limit = _mean(method, "error"), _mean(user, "error")
    if error > (1.05 * limit if is_regression else limit + 0.01):
        broken.append("error")
    for name in ("nll", "calibration"):
        mean, standard_error = paired(method, user, name)
        if mean > 2 * standard_error:
            broken.append(name)
    return broken


def paired(method: Sequence[Run], user: Sequence[Run], name: str) -> tuple[float, float]:
    """Mean of the paired difference, and its standard error: 0 for a single seed, NaN if a run diverged."""
    differences = [a[name] - b[name] for a, b in zip(method, user, strict=True)]
    if not all(map(math.isfinite, differences)):
        return math.nan, math.nan
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return statistics.mean(differences), error


def _mean(runs: Sequence[Run], name: str) -> float:
    return statistics.mean(run[name] for run in runs)
