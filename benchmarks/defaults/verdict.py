"""The promises of a callback with default arguments, for each problem and user's optimizer.

    no run diverges or stays at chance
    accuracy: at most one point lower;  RMSE: at most 5 % higher          mean over seeds
    NLL and calibration error: not higher by more than two standard errors of the difference

Runs are paired by seed, which fixes the split, the initial weights and the batch order. Pairing makes the standard error
small: a difference of a thousandth of a nat that all seeds share breaks a promise. The unpaired standard error is that of
two means of independent runs; it asks whether a reader of two separate tables could tell the methods apart.

A single run has no standard error. If its NLL or calibration error is higher than the user's, the promise is undecided:
neither broken nor kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.over_seeds import standard_error

Run = Mapping[str, float]  # scores of one seed
NOISY_SCORES = ("nll", "calibration")  # compared in standard errors


def failures(
    method: Sequence[Run], user: Sequence[Run], is_regression: bool, chance: float, is_paired: bool = True
) -> list[str]:
    """The broken promises, one word each; undecided promises are not among them."""
    broken = []
    if any(not math.isfinite(run["nll"]) or run["error"] >= 0.95 * chance for run in method):
        broken.append("chance")
    error, limit = _mean(method, "error"), _mean(user, "error")
    if error > (1.05 * limit if is_regression else limit + 0.01):
        broken.append("error")
    for name in NOISY_SCORES:
        mean, error_of_mean = (paired if is_paired else unpaired)(method, user, name)
        if mean > 2 * error_of_mean:
            broken.append(name)
    return broken


def undecided(method: Sequence[Run], user: Sequence[Run]) -> list[str]:
    """The promises that a single run cannot decide, because its score is higher but the standard error is unknown."""
    return [name for name in NOISY_SCORES if len(method) == 1 and paired(method, user, name)[0] > 0]


def paired(method: Sequence[Run], user: Sequence[Run], name: str) -> tuple[float, float]:
    """Mean of the paired difference, NaN if a run diverged; and its standard error, NaN also for a single seed."""
    differences = [a[name] - b[name] for a, b in zip(method, user, strict=True)]
    if not all(map(math.isfinite, differences)):
        return math.nan, math.nan
    return statistics.mean(differences), standard_error(differences)


def unpaired(method: Sequence[Run], user: Sequence[Run], name: str) -> tuple[float, float]:
    """As `paired`, with the standard error of two independent means."""
    mean, error = paired(method, user, name)
    if len(method) < 2 or not math.isfinite(mean):
        return mean, error
    variances = [statistics.variance(run[name] for run in runs) / len(runs) for runs in (method, user)]
    return mean, math.sqrt(sum(variances))


def _mean(runs: Sequence[Run], name: str) -> float:
    return statistics.mean(run[name] for run in runs)
