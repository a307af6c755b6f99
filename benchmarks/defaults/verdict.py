"""The promises about a callback without arguments, for each problem and user's optimizer.

no run diverges or stays at chance
accuracy: at most one point lower;  RMSE: at most 5 % higher          mean over seeds
NLL and calibration error: not higher by more than two standard errors of the difference

Seeds are paired: they fix split, starting weights and order of batches. That makes the standard error small, and a
difference of a thousandth of a nat that all seeds share a broken promise. Unpaired, it is that of two means of independent
runs, which asks whether a reader of two tables could tell them apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

Run = Mapping[str, float]  # scores of one seed


def failures(
    method: Sequence[Run], user: Sequence[Run], is_regression: bool, chance: float, is_paired: bool = True
) -> list[str]:
    """Which promises are broken, in words.

    Args:
        method: Scores of the callback, one mapping per seed.
        user: Scores of the user's optimizer alone, seeds in the same order.
        is_regression: Whether errors are RMSE.
        chance: Error of knowing nothing.
        is_paired: Whether standard errors are those of paired differences.

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
        mean, standard_error = (paired if is_paired else unpaired)(method, user, name)
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


def unpaired(method: Sequence[Run], user: Sequence[Run], name: str) -> tuple[float, float]:
    """As `paired`, with the standard error of two independent means."""
    mean, error = paired(method, user, name)
    if len(method) < 2 or not math.isfinite(mean):
        return mean, error
    variances = [statistics.variance(run[name] for run in runs) / len(runs) for runs in (method, user)]
    return mean, math.sqrt(sum(variances))


def _mean(runs: Sequence[Run], name: str) -> float:
    return statistics.mean(run[name] for run in runs)
