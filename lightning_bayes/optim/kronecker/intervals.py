"""When curvature is measured and inverted: every T_stats and every T_inv updates; layers take turns.

Averages start from a single batch, so the early ones change fast: they are also inverted at the measurements 1, 2, 4, 8, and
so on.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_bayes.errors import HyperparameterError


def is_due(step: int, interval: int, offset: int = 0) -> bool:
    """Whether an action that repeats every `interval` updates is due; at the first update every action is.

    Args:
        step: Number of the update, from 1.
        interval: T.
        offset: Delay, such as the layer's number, which spreads the work of many layers over the interval.

    Returns:
        True if it is due.

    Example:
        >>> [step for step in range(1, 12) if is_due(step, 5)], [step for step in range(1, 12) if is_due(step, 5, 2)]
        ([1, 6, 11], [1, 3, 8])
    """
    return step == 1 or (step - 1 - offset) % interval == 0


def layers_due(counts: Sequence[int], step: int, interval: int, *, measures: bool) -> list[int]:
    """The layers whose factors are inverted in an update.

    Args:
        counts: Number of measurements of each layer so far.
        step: Number of the update, from 1.
        interval: T_inv, over which the layers take turns.
        measures: Whether this update has measured.

    Returns:
        Numbers of the layers.

    Example:
        >>> layers_due([16, 17], 2, 100, measures=True), layers_due([16, 17], 51, 100, measures=False)
        ([0], [1])
    """
    delays = [turn * interval // len(counts) for turn in range(len(counts))]
    return [
        i
        for i, (count, delay) in enumerate(zip(counts, delays, strict=True))
        if (measures and _is_power_of_two(count)) or is_due(step, interval, delay)
    ]


def _is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


def check_intervals(stats_interval: int, inverse_interval: int) -> None:
    """Require whole numbers of at least 1, and no inverse without new statistics.

    Args:
        stats_interval: T_stats.
        inverse_interval: T_inv.

    Raises:
        HyperparameterError: If they are not.
    """
    named = {"stats_interval": stats_interval, "inverse_interval": inverse_interval}
    wrong = [
        f"{name}={value!r} must be a whole number of at least 1" for name, value in named.items() if not _ok(value)
    ]
    if wrong:
        raise HyperparameterError("; ".join(wrong) + ".")
    if inverse_interval < stats_interval:
        raise HyperparameterError(
            f"inverse_interval={inverse_interval} is below stats_interval={stats_interval}: it would invert factors that "
            f"have not changed. Use inverse_interval={stats_interval} or more."
        )


def _ok(value: object) -> bool:
    return isinstance(value, int) and value >= 1
