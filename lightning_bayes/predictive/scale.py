"""Fit the scale of a finished posterior's standard deviations to the NLL of its prediction on validation data.

    c* = argmin_c NLL(c)        NLL(c) = -mean_i log (1/S) Σ_s p(y_i | x_i, μ + c (θ_s - μ))        c ≥ 0

Every scale uses the same noise, so NLL(c) is smooth and the search is deterministic. It evaluates c = 0, the posterior mean,
then the grid 2⁻⁵, 2⁻⁴, …, 2⁶, then Brent's method between the neighbours of the best grid point. c = 0 wins ties, so the
fitted scale never has a higher NLL than the mean on these data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from lightning_bayes.errors import NonFiniteError
from lightning_bayes.predictive.line_search import minimise_over_logarithm

SMALLEST, LARGEST = 2.0**-5, 2.0**6  # bounds of c > 0; smaller scales predict like the mean
_GRID = 12  # grid points, a factor of 2 apart
_TOLERANCE = 0.01  # of log c: the NLL is flat at its minimum
_TIE = 1e-6  # nats per target; smaller differences are rounding errors


class FittedScale(NamedTuple):
    """The scale with the lowest NLL."""

    scale: float  # c
    nll: float  # at c, in nats per target
    nll_of_mean: float  # at c = 0


def fit_scale(nll: Callable[[float], float]) -> FittedScale:
    """Choose the scale of a posterior's standard deviations.

    Args:
        nll: Returns the NLL of the validation data at a scale c ≥ 0, per target, with the same noise for every scale; see
            `predictive_nll`.

    Returns:
        The scale, 0 or between `SMALLEST` and `LARGEST`, with its NLL and the NLL of the mean.

    Raises:
        NonFiniteError: If the NLL of the mean is not finite.

    Example:
        >>> fitted = fit_scale(lambda c: 0.5 + (c - 1.5) ** 2)
        >>> round(fitted.scale, 2), fitted.nll_of_mean
        (1.5, 2.75)
        >>> fit_scale(lambda c: 0.5).scale  # no scale improves on the mean
        0.0
    """
    nll_of_mean = nll(0.0)
    if not math.isfinite(nll_of_mean):
        raise NonFiniteError(
            f"The NLL of the posterior mean is {nll_of_mean} on the validation data. Its outputs are not finite."
        )
    cached_nll = cache(nll)
    scale = minimise_over_logarithm(cached_nll, SMALLEST, LARGEST, _GRID, _TOLERANCE)
    if not cached_nll(scale) < nll_of_mean - _TIE:
        return FittedScale(0.0, nll_of_mean, nll_of_mean)
    return FittedScale(scale, cached_nll(scale), nll_of_mean)
