"""When K-FAC measures and inverts factors: every T_stats and every T_inv updates, with the layers' inversions staggered.

Averages start from a single batch and change fast at first, so they are also inverted after 1, 2, 4, 8, … measurements.
"""

from __future__ import annotations

from collections.abc import Sequence


def is_due(step: int, interval: int, offset: int = 0) -> bool:
    """Whether an action that repeats every `interval` updates is due; every action is due at the first update.

    Args:
        step: Update index, from 1.
        interval: T.
        offset: Delay in updates, to spread the work of many layers over the interval.

    Returns:
        True if the action is due.

    Example:
        >>> [step for step in range(1, 12) if is_due(step, 5)], [step for step in range(1, 12) if is_due(step, 5, 2)]
        ([1, 6, 11], [1, 3, 8])
    """
    return step == 1 or (step - 1 - offset) % interval == 0


def layers_due(counts: Sequence[int], step: int, interval: int, *, measures: bool) -> list[int]:
    """Select the layers whose factors are inverted in an update.

    Args:
        counts: Number of measurements of each layer so far.
        step: Update index, from 1.
        interval: T_inv, over which the inversions are spread.
        measures: Whether this update has measured the factors.

    Returns:
        Indices of the layers.

    Example:
        >>> layers_due([16, 17], 2, 100, measures=True), layers_due([16, 17], 51, 100, measures=False)
        ([0], [1])
    """
    due = []
    for i, count in enumerate(counts):
        offset = i * interval // len(counts)
        if (measures and _is_power_of_two(count)) or is_due(step, interval, offset):
            due.append(i)
    return due


def _is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0
