"""Minimising a function of one positive number: a grid in its logarithm, then Brent's method around the best point."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache


def minimise_over_logarithm(
    loss: Callable[[float], float], smallest: float, largest: float, steps: int, tolerance: float
) -> float:
    """Minimise without derivatives; the function may have several minima.

    Args:
        loss: A function of a positive number; a value that is not a number counts as infinite.
        smallest: First point of the grid, above 0.
        largest: Last point.
        steps: Number of points, equally spaced in the logarithm.
        tolerance: The tolerance of the logarithm, in the search between the neighbours of the best point.

    Returns:
        The best number that was tried.

    Example:
        >>> round(minimise_over_logarithm(lambda x: math.log(x / 3) ** 2, 0.1, 10.0, steps=7, tolerance=1e-6), 5)
        3.0
    """
    from scipy.optimize import minimize_scalar  # slow to import

    @cache
    def at(log: float) -> float:
        value = loss(math.exp(log))
        return math.inf if math.isnan(value) else value

    low, high = math.log(smallest), math.log(largest)
    grid = [low + (high - low) * step / (steps - 1) for step in range(steps)]
    best = min(range(steps), key=lambda step: at(grid[step]))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, steps - 1)]
    found = minimize_scalar(lambda log: at(float(log)), bounds=bounds, method="bounded", options={"xatol": tolerance})
    # The search approaches a bound but does not reach it; where the loss is flat, the grid point counts.
    return math.exp(min([grid[best], float(found.x)], key=at))
