"""Quantiles of mixtures of distributions, by bisection of the exact distribution function.

    F(y) = (1/S) Σ_s F_s(y)        q_p = inf {y : F(y) ≥ p}

torch.distributions has no distribution function of Student's t, of the Poisson and of the negative binomial distribution:

    Student-t, y ≥ 0     1 - ½ I_x(ν/2, ½)             x = ν / (ν + y²)
    Poisson              Q(⌊y⌋ + 1, λ)                 regularised upper incomplete gamma function
    negative binomial    1 - I_p(⌊y⌋ + 1, r)           p the probability of a success, r the number of failures

I is the regularised incomplete beta function, from its continued fraction (Lentz's method).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    MixtureSameFamily,
    NegativeBinomial,
    Poisson,
    StudentT,
)

_DOUBLINGS = 64  # of the interval that encloses a quantile
_HALVINGS = 60
_FRACTIONS = 200  # terms of the continued fraction
_TINY = 1e-300


def mixture_quantile(distribution: Distribution, samples: int, level: float) -> Tensor:
    """The quantile p of each target's mixture over samples, ``[examples, …]``, from a batch ``[samples · examples, …]``."""
    means = grouped(_finite(distribution.mean), samples)
    width = grouped(_finite(distribution.stddev), samples).amax(0).clamp_min(1e-6)
    low, high = means.amin(0) - width, means.amax(0) + width

    def is_below(y: Tensor) -> Tensor:
        repeated = y.expand(samples, *y.shape).flatten(0, 1)
        return grouped(distribution_function(distribution, repeated), samples).mean(0) < level

    for _ in range(_DOUBLINGS):
        outside_low, outside_high = ~is_below(low), is_below(high)
        if not bool((outside_low | outside_high).any()):
            break
        low, high, width = (
            torch.where(outside_low, low - width, low),
            torch.where(outside_high, high + width, high),
            2 * width,
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high.floor() if getattr(distribution.support, "is_discrete", False) else high


def distribution_function(distribution: Distribution, y: Tensor) -> Tensor:
    """P(Y ≤ y); of the Gaussian with the same mean and variance where a family's function is unknown."""
    if isinstance(distribution, Independent):
        return distribution_function(distribution.base_dist, y)
    if isinstance(distribution, MixtureSameFamily):
        inner = distribution_function(distribution.component_distribution, y.unsqueeze(-1))
        return (inner * distribution.mixture_distribution.probs).sum(-1)
    known = _FUNCTIONS.get(type(distribution))
    if known is not None:
        return known(distribution, y)
    try:
        values: Tensor = distribution.cdf(y)
    except NotImplementedError:
        values = torch.special.ndtr((y - distribution.mean) / distribution.stddev)
    return values


def _student(distribution: StudentT, y: Tensor) -> Tensor:
    scaled, df = (y - distribution.loc) / distribution.scale, distribution.df.double()
    tail = incomplete_beta(df / (df + scaled.square()), df / 2, torch.full_like(df, 0.5)) / 2
    return torch.where(scaled < 0, tail, 1 - tail)


def _poisson(distribution: Poisson, y: Tensor) -> Tensor:
    values = torch.special.gammaincc(y.floor().clamp_min(0) + 1, distribution.rate.to(y.dtype))
    return torch.where(y < 0, torch.zeros_like(values), values)


def _negative_binomial(distribution: NegativeBinomial, y: Tensor) -> Tensor:
    values = 1 - incomplete_beta(
        distribution.probs.double(), y.floor().clamp_min(0) + 1, distribution.total_count.double()
    )
    return torch.where(y < 0, torch.zeros_like(values), values)


_FUNCTIONS: Final[dict[type[Distribution], Callable[..., Tensor]]] = {
    StudentT: _student,
    Poisson: _poisson,
    NegativeBinomial: _negative_binomial,
}


def incomplete_beta(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """I_x(a, b), the regularised incomplete beta function, in float64, of the broadcast shape."""
    x, a, b = torch.broadcast_tensors(x.double(), a.double(), b.double())  # type: ignore[no-untyped-call]
    swap = x > (a + 1) / (a + b + 2)  # where the fraction of the complement converges faster
    x, a, b = torch.where(swap, 1 - x, x), torch.where(swap, b, a), torch.where(swap, a, b)
    log_front = a * x.log() + b * torch.log1p(-x) - (torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b))
    values = (log_front.exp() / a * _fraction(x, a, b)).nan_to_num()
    return torch.where(swap, 1 - values, values)


def _fraction(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The continued fraction of the incomplete beta function."""
    c = torch.ones_like(x)
    d = 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _FRACTIONS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value = value * d * c
        if bool(((d * c - 1).abs() < 1e-14).all()):
            break
    return value


def _away_from_zero(values: Tensor) -> Tensor:
    return torch.where(values.abs() < _TINY, torch.full_like(values, _TINY), values)


def grouped(values: Tensor, samples: int) -> Tensor:
    """Values ``[samples · examples, …]`` as ``[samples, examples, …]``."""
    return values.reshape(samples, -1, *values.shape[1:])


def _finite(values: Tensor) -> Tensor:
    """Values in float64, with 0 or a large number where a moment does not exist."""
    return values.double().nan_to_num(0, 1e6, -1e6)
