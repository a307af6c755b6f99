"""Mixtures over samples of distributions of real-valued targets: moments, and quantiles inside the support.

    p(y | x) ≈ (1/S) Σ_s p(y | f_s)        Var y = E_s Var[y | f_s] + Var_s E[y | f_s]
                                                       aleatoric          epistemic

    F(y) = (1/S) Σ_s F_s(y)                q_p = inf {y : F(y) ≥ p}, by bisection

A family without a distribution function, such as the von Mises, has the quantiles of values drawn from it.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.distributions import Distribution

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood.distribution_functions import bounds_of, distribution_function, is_discrete
from lightning_bayes.likelihood.predictions import Observed
from lightning_bayes.private_torch import unvalidated

_DOUBLINGS: Final = 64  # of the interval that encloses a quantile
_HALVINGS: Final = 200  # until it is `_WIDTH` times its ends
_WIDTH: Final = 1e-12
_DRAWS: Final = 4096  # of each target's mixture
_MOST_DRAWN: Final = 2**24  # numbers


def observed(distribution: Distribution, samples: int, interval: float = 0.9) -> Observed:
    """Mean, variances and central interval of each target under the mixture over samples, with batch ``[S · B, …]``."""
    if not 0 < interval < 1:
        raise HyperparameterError(f"interval={interval!r} must be a probability between 0 and 1, such as 0.9.")
    mean, variance = moments(distribution)
    means, variances = grouped(mean, samples), grouped(variance, samples)
    levels = [(1 + sign * interval) / 2 for sign in (-1, 1)]
    ends = (end.to(means.dtype) for end in mixture_quantiles(distribution, samples, levels))
    return Observed(means.mean(0), variances.mean(0), means.var(0, correction=0), *ends)


def moments(distribution: Distribution) -> tuple[Tensor, Tensor]:
    """Mean and variance of each target; those of 4096 quantiles or draws where torch does not know them."""
    try:
        return distribution.mean, distribution.variance
    except NotImplementedError:
        values = _values(distribution, _DRAWS)
        return values.mean(0), values.var(0)


def mixture_quantile(distribution: Distribution, samples: int, level: float) -> Tensor:
    """The quantile p of each target's mixture over samples, ``[examples, …]``, from a batch ``[samples · examples, …]``."""
    return mixture_quantiles(distribution, samples, [level])[0]


def mixture_quantiles(distribution: Distribution, samples: int, levels: list[float]) -> list[Tensor]:
    """Several levels of `mixture_quantile`."""
    try:
        return [_searched(distribution, samples, level) for level in levels]
    except NotImplementedError:
        drawn = _drawn(distribution, max(1, _DRAWS // samples)).double()
        values = drawn.reshape(len(drawn) * samples, -1, *drawn.shape[2:]).sort(0).values
        return [values[max(0, math.ceil(level * len(values)) - 1)] for level in levels]


def _searched(distribution: Distribution, samples: int, level: float) -> Tensor:
    """`mixture_quantile` by bisection of the distribution function inside the support."""
    mean, variance = moments(distribution)
    lowest, highest = (_ends(bound, mean, samples) for bound in bounds_of(distribution))
    lowest, highest = lowest.amin(0), highest.amax(0)
    means = grouped(_finite(mean), samples)
    width = grouped(_finite(variance.sqrt()), samples).amax(0).clamp_min(1e-6)

    def function(y: Tensor) -> Tensor:
        repeated = y.expand(samples, *y.shape).flatten(0, 1)
        return grouped(distribution_function(distribution, repeated), samples).mean(0)

    def is_below(y: Tensor) -> Tensor:
        return function(y) < level

    low = torch.maximum(means.amin(0) - width, lowest)
    high = torch.minimum(means.amax(0) + width, highest)
    for _ in range(_DOUBLINGS):
        outside_low, outside_high = ~is_below(low) & (low > lowest), is_below(high) & (high < highest)
        if not bool((outside_low | outside_high).any()):
            break
        low = torch.where(outside_low, torch.maximum(low - width, lowest), low)
        high = torch.where(outside_high, torch.minimum(high + width, highest), high)
        width = 2 * width
    discrete = is_discrete(distribution)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        if bool((high - low < (1 if discrete else _WIDTH * torch.maximum(low.abs(), high.abs()))).all()):
            break
    found = high.floor() if discrete else high
    return torch.where(function(found).isnan(), math.nan, found)


def grouped(values: Tensor, samples: int) -> Tensor:
    """Values ``[samples · examples, …]`` as ``[samples, examples, …]``."""
    return values.reshape(samples, -1, *values.shape[1:])


def _ends(bound: object, mean: Tensor, samples: int) -> Tensor:
    """A bound of the support of each target, in the shape of the means."""
    ends = torch.as_tensor(bound, dtype=torch.float64, device=mean.device)
    return grouped(ends.expand(mean.shape), samples)


def _values(distribution: Distribution, count: int) -> Tensor:
    """Quantiles at equal distances ``[count, S · B, …]``, or draws from a family without them."""
    number = _affordable(distribution, count)
    device = _drawn(distribution, 1).device
    levels = (torch.arange(number, dtype=torch.float64, device=device) + 0.5) / number
    try:
        shaped = levels.reshape(-1, *[1] * len(distribution.batch_shape))
        values: Tensor = unvalidated(distribution).icdf(shaped)
    except NotImplementedError:
        values = _drawn(distribution, count)
    return values


def _drawn(distribution: Distribution, count: int) -> Tensor:
    """Values ``[count, S · B, …]``; the global random state is kept."""
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        return unvalidated(distribution).sample(torch.Size([_affordable(distribution, count)]))


def _affordable(distribution: Distribution, count: int) -> int:
    numel = (distribution.batch_shape + distribution.event_shape).numel()
    return max(1, min(count, _MOST_DRAWN // max(1, numel)))


def _finite(values: Tensor) -> Tensor:
    """Values in float64, with 0 or a large number where a moment does not exist."""
    return values.double().nan_to_num(0, 1e6, -1e6)
