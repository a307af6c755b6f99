"""The width of a finished posterior, chosen by the NLL of its prediction on validation data.

    c* = argmin_c NLL(c)        NLL(c) = -mean_i log (1/S) Σ_s p(y_i | x_i, μ + c (θ_s - μ))        c ≥ 0

The same noise serves every width, so NLL(c) is a smooth function and the search is deterministic: c = 0, the posterior mean,
then the grid 2⁻⁵, 2⁻⁴, …, 2⁶, then Brent's method between the neighbours of the best point. c = 0 wins ties, and no chosen
width has a higher NLL than the mean on these data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from lightning_bayes.errors import NonFiniteError
from lightning_bayes.predictive.line_search import minimise_over_logarithm

SMALLEST, LARGEST = 2.0**-5, 2.0**6  # bounds of c > 0; below them the prediction is that of the mean
_GRID = 12  # factors of 2
_TOLERANCE = 0.01  # of log c: the NLL is flat at its minimum
_TIE = 1e-6  # nats per target; differences below it are rounding


class FittedScale(NamedTuple):
    """The width of the lowest NLL."""

    scale: float  # c
    nll: float  # at c, in nats per target
    nll_of_mean: float  # at 0


def fit_scale(nll: Callable[[float], float]) -> FittedScale:
    """Choose the width of a posterior.

    Args:
        nll: NLL of validation data at a width c ≥ 0, per target, from the same noise at every width; see `predictive_nll`.

    Returns:
        The width, 0 or from `SMALLEST` to `LARGEST`, with its NLL and that of the mean.

    Raises:
        NonFiniteError: If the NLL of the mean is not finite.

    Example:
        >>> found = fit_scale(lambda c: 0.5 + (c - 1.5) ** 2)
        >>> round(found.scale, 2), found.nll_of_mean
        (1.5, 2.75)
        >>> fit_scale(lambda c: 0.5).scale  # nothing to gain
        0.0
    """
    of_mean = nll(0.0)
    if not math.isfinite(of_mean):
        raise NonFiniteError(
            f"The NLL of the posterior mean is {of_mean} on the validation data; its outputs are broken."
        )
    seen: dict[float, float] = {}

    def remembered(scale: float) -> float:
        seen[scale] = nll(scale)
        return seen[scale]

    scale = minimise_over_logarithm(remembered, SMALLEST, LARGEST, _GRID, _TOLERANCE)
    if not seen[scale] < of_mean - _TIE:
        return FittedScale(0.0, of_mean, of_mean)
    return FittedScale(scale, seen[scale], of_mean)
