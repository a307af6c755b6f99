"""Amortised curvature: each of the first ten updates measures it, then every T-th.

A measurement ĥ accounts for all updates since the previous one, as if each of them had measured the same ĥ. If there are e
of them and the last is update t, the running average weights the old curvature by

    β₂ᵉ                                      natural step of the papers
    Π_{i = t-e+1}^{t} min(β₂, (i-1)/i)       other steps, whose average starts as a running mean

and ĥ by one minus that. T = 1 measures at every update. The schedule depends on the update index alone, so a resumed run,
the micro-batches of an update and all processes agree on it without communication.

The numbers that scale a tensor's noise change slowly too: `optim.covariance.diagonal.is_refreshed` says when.
"""

from __future__ import annotations

from math import prod

from lightning_bayes.errors import HyperparameterError

BASE_INTERVAL = 10  # default T if another optimizer moves the means and the curvature only shapes the noise
FIRST_UPDATES = 10  # updates that always measure: early in training the curvature changes fast
SHAPE_INTERVAL = 10  # updates until the shape of the noise is stored again


def elapsed_updates(param_update: int, update: int, interval: int) -> int:
    """e, the number of updates for which a measurement in this one accounts; 0 if it does not measure."""
    if param_update <= FIRST_UPDATES:
        return 1
    return min(interval, param_update - FIRST_UPDATES) if (update - FIRST_UPDATES) % interval == 0 else 0


def updates_covered(param_update: int, update: int, interval: int) -> int:
    """Number of a parameter's updates that its measurements account for: the index of its last update that measured."""
    if param_update <= FIRST_UPDATES:
        return param_update
    return max(FIRST_UPDATES, param_update - (update - FIRST_UPDATES) % interval)


def weight_of_old(beta: float, measurements: int, elapsed: int, *, starts_as_mean: bool) -> float:
    """The weight of the old curvature in the running average."""
    if not starts_as_mean:
        return beta**elapsed
    return prod(min(beta, (t - 1) / t) for t in range(measurements - elapsed + 1, measurements + 1))


def require_interval(optimizer: str, interval: int, *, amortises: bool) -> None:
    """Require T = 1 for methods that measure at every update."""
    if interval > 1 and not amortises:
        raise HyperparameterError(
            f"{optimizer} does not support curvature_interval={interval}: its curvature is not a running average of costly "
            "measurements, or it has its own interval (K-FAC: stats_interval). Leave curvature_interval=1."
        )
