"""Quantiles of mixtures of distributions, by bisection of the exact distribution function.

    F(y) = (1/S) Σ_s F_s(y)        q_p = inf {y : F(y) ≥ p}

torch.distributions has no distribution function of Student's t, of the Poisson and of the negative binomial distribution:
these are SciPy's, or Q(⌊y⌋ + 1, λ), the regularised upper incomplete gamma function.
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
        low = torch.where(outside_low, low - width, low)
        high = torch.where(outside_high, high + width, high)
        width = 2 * width
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
    return _of_scipy("stdtr", distribution.df, (y - distribution.loc) / distribution.scale)


def _poisson(distribution: Poisson, y: Tensor) -> Tensor:
    values = torch.special.gammaincc(y.floor().clamp_min(0) + 1, distribution.rate.to(y.dtype))
    return torch.where(y < 0, torch.zeros_like(values), values)


def _negative_binomial(distribution: NegativeBinomial, y: Tensor) -> Tensor:
    count = y.floor().clamp_min(0) + 1
    values = _of_scipy("betainc", distribution.total_count, count, 1 - distribution.probs.double())
    return torch.where(y < 0, torch.zeros_like(values), values)


def _of_scipy(name: str, *arguments: Tensor) -> Tensor:
    """A function of `scipy.special` in float64."""
    from scipy import special  # slow to import

    values = getattr(special, name)(*(value.detach().cpu().double().numpy() for value in arguments))
    return torch.as_tensor(values, dtype=torch.float64, device=arguments[0].device)


_FUNCTIONS: Final[dict[type[Distribution], Callable[..., Tensor]]] = {
    StudentT: _student,
    Poisson: _poisson,
    NegativeBinomial: _negative_binomial,
}


def grouped(values: Tensor, samples: int) -> Tensor:
    """Values ``[samples · examples, …]`` as ``[samples, examples, …]``."""
    return values.reshape(samples, -1, *values.shape[1:])


def _finite(values: Tensor) -> Tensor:
    """Values in float64, with 0 or a large number where a moment does not exist."""
    return values.double().nan_to_num(0, 1e6, -1e6)
