"""When an update measures the curvature: in each of the first ten updates, then in every T-th.

A measurement ĥ stands for all updates since the one before, as if each of them had measured ĥ again. With e such updates,
the last of them the t-th, the running average weights the old curvature by

    β₂ᵉ                                      the papers' step
    Π_{i = t-e+1}^{t} min(β₂, (i-1)/i)       other steps, whose average starts as a running mean

and the new one by the rest. T = 1 is the average of every update. Both numbers are functions of the update's number, so a
resumed run, the micro-batches of an update and all processes agree without communication.
"""

from __future__ import annotations

from lightning_bayes.errors import HyperparameterError

FIRST = 10  # updates that measure in any case: the curvature of a fresh network moves fast


def updates_since(own: int, number: int, interval: int) -> int:
    """For how many updates a measurement in this one stands.

    Args:
        own: Number of this update among those of the parameter, from 1; below `number` if it was frozen at the start.
        number: Number of this update, from 1.
        interval: T.

    Returns:
        e, at least 1; or 0 where nothing is measured.

    Example:
        >>> [number for number in range(1, 31) if updates_since(number, number, 10)]
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30]
        >>> updates_since(10, 10, 10), updates_since(11, 11, 10), updates_since(20, 20, 10)
        (1, 0, 10)
    """
    if own <= FIRST:
        return 1
    return min(interval, own - FIRST) if (number - FIRST) % interval == 0 else 0


def updates_covered(own: int, number: int, interval: int) -> int:
    """How many of a parameter's updates its measurements stand for.

    Args:
        own: Number of this update among those of the parameter, from 1.
        number: Number of this update, from 1.
        interval: T.

    Returns:
        The number of its last update that measured, this one included.

    Example:
        >>> [updates_covered(number, number, 10) for number in (3, 10, 15, 20, 25)]
        [3, 10, 10, 20, 20]
    """
    return own if own <= FIRST else max(FIRST, own - (number - FIRST) % interval)


def require_interval(optimizer: str, interval: int, *, amortises: bool) -> None:
    """Require T = 1 of a method that needs a measurement in every update.

    Args:
        optimizer: Its name, for the message.
        interval: T.
        amortises: Whether the method may go without.

    Raises:
        HyperparameterError: If it may not, and T is above 1.
    """
    if interval > 1 and not amortises:
        raise HyperparameterError(
            f"{optimizer} takes no curvature_interval={interval}: its curvature is not a running average of costly "
            "measurements, or it has an interval of its own (K-FAC: stats_interval). Leave curvature_interval=1."
        )
