"""Minimise a function of one positive number: a grid in its logarithm, then Brent's method around the best point."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np


def minimise_over_logarithm(
    loss: Callable[[float], float], smallest: float, largest: float, steps: int, tolerance: float
) -> float:
    """The best x of a grid in log x, refined by Brent's method to `tolerance`; a loss of ``nan`` counts as infinite."""
    from scipy.optimize import minimize_scalar  # slow to import

    @cache
    def loss_at(log: float) -> float:
        value = loss(math.exp(log))
        return math.inf if math.isnan(value) else value

    low, high = math.log(smallest), math.log(largest)
    grid = [low + (high - low) * step / (steps - 1) for step in range(steps)]
    best = min(range(steps), key=lambda step: loss_at(grid[step]))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, steps - 1)]
    with np.errstate(invalid="ignore"):  # SciPy subtracts infinite losses, then falls back to a golden-section step
        result = minimize_scalar(
            lambda log: loss_at(float(log)), bounds=bounds, method="bounded", options={"xatol": tolerance}
        )
    # The search never reaches a bound, so the grid point may be better. It also wins ties on a flat loss.
    return math.exp(min([grid[best], float(result.x)], key=loss_at))
