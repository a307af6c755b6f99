"""Distribution functions P(Y ≤ y) of the families of `torch.distributions`, and the bounds of their supports.

torch has none of Student's t, Beta, Binomial, negative binomial, Fisher-Snedecor and Poisson distributions: these are
SciPy's, or Q(⌊y⌋ + 1, λ), the regularised upper incomplete gamma function. A monotone transform y = t(x) keeps them:
P(Y ≤ y) = P(X ≤ t⁻¹(y)), and P(X ≥ t⁻¹(y)) if t decreases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributions as families
from torch.distributions import Distribution

from lightning_bayes.private_torch import unvalidated


def bounds_of(distribution: Distribution) -> tuple[Any, Any]:
    """The smallest and the largest value of each target; infinite where there is none."""
    if isinstance(distribution, families.MixtureSameFamily):
        low, high = bounds_of(distribution.component_distribution)
        last = -1 - len(distribution.event_shape)
        return (low.amin(last) if isinstance(low, Tensor) else low), (
            high.amax(last) if isinstance(high, Tensor) else high
        )
    if isinstance(distribution, families.Bernoulli):
        return 0, 1
    support: Any = distribution.support
    while hasattr(support, "base_constraint"):  # of independent targets
        support = support.base_constraint
    return getattr(support, "lower_bound", -math.inf), getattr(support, "upper_bound", math.inf)


def distribution_function(distribution: Distribution, y: Tensor) -> Tensor:
    """P(Y ≤ y); raises `NotImplementedError` for families whose function is not known."""
    low, high = bounds_of(distribution)
    inside = y.clamp(*(torch.as_tensor(bound, dtype=y.dtype, device=y.device) for bound in (low, high)))
    values = _inside(unvalidated(distribution), inside)
    return torch.where(y < low, torch.zeros_like(values), torch.where(y >= high, torch.ones_like(values), values))


def is_discrete(distribution: Distribution) -> bool:
    """Whether targets are whole numbers."""
    if isinstance(distribution, families.MixtureSameFamily):
        return is_discrete(distribution.component_distribution)
    return bool(getattr(distribution.support, "is_discrete", False))


def _inside(distribution: Distribution, y: Tensor) -> Tensor:
    """P(Y ≤ y) for y inside the support."""
    if isinstance(distribution, families.Independent):
        return distribution_function(distribution.base_dist, y)
    if isinstance(distribution, families.MixtureSameFamily):
        inner = distribution_function(distribution.component_distribution, y.unsqueeze(-1))
        return (inner * distribution.mixture_distribution.probs).sum(-1)
    for family, function in _FUNCTIONS.items():
        if isinstance(distribution, family):
            return function(distribution, y)
    if distribution.event_shape:
        raise NotImplementedError(f"{type(distribution).__name__} has no distribution function of one target.")
    return _own(distribution, y)


def _own(distribution: Distribution, y: Tensor) -> Tensor:
    values: Tensor = distribution.cdf(y)
    return values


def _transformed(distribution: families.TransformedDistribution, y: Tensor) -> Tensor:
    if type(distribution).cdf is not families.TransformedDistribution.cdf:  # such as a half-normal's
        return _own(distribution, y)
    sign: Any = 1
    if distribution.event_shape or not all(transform.bijective for transform in distribution.transforms):
        raise NotImplementedError(f"{type(distribution).__name__} transforms by a function that is not monotone.")
    for transform in reversed(distribution.transforms):
        y, sign = transform.inv(y), sign * transform.sign
    values = distribution_function(distribution.base_dist, y)
    return torch.where(torch.as_tensor(sign, device=y.device) < 0, 1 - values, values)


def _student(distribution: Any, y: Tensor) -> Tensor:
    return _of_scipy("stdtr", distribution.df, (y - distribution.loc) / distribution.scale)


def _beta(distribution: Any, y: Tensor) -> Tensor:
    return _of_scipy("betainc", distribution.concentration1, distribution.concentration0, y)


def _fisher(distribution: Any, y: Tensor) -> Tensor:
    return _of_scipy("fdtr", distribution.df1, distribution.df2, y)


def _normal_marginals(distribution: Any, y: Tensor) -> Tensor:
    values: Tensor = torch.special.ndtr((y - distribution.mean) / distribution.stddev)
    return values


def _poisson(distribution: Any, y: Tensor) -> Tensor:
    values: Tensor = torch.special.gammaincc(y.floor() + 1, distribution.rate.to(y.dtype))
    return values


def _negative_binomial(distribution: Any, y: Tensor) -> Tensor:
    return _of_scipy("betainc", distribution.total_count, y.floor() + 1, 1 - distribution.probs.double())


def _binomial(distribution: Any, y: Tensor) -> Tensor:
    left = distribution.total_count.double() - y.floor()  # trials; betainc(0, …) is 1 at the largest count
    return _of_scipy("betainc", left.clamp_min(1e-300), y.floor() + 1, 1 - distribution.probs.double())


def _bernoulli(distribution: Any, y: Tensor) -> Tensor:
    values: Tensor = (1 - distribution.probs.to(y.dtype)).expand_as(y)
    return values


def _geometric(distribution: Any, y: Tensor) -> Tensor:
    values: Tensor = 1 - (1 - distribution.probs.to(y.dtype)) ** (y.floor() + 1)
    return values


def _of_scipy(name: str, *arguments: Tensor) -> Tensor:
    """A function of `scipy.special` in float64."""
    from scipy import special  # slow to import

    values = getattr(special, name)(*(value.detach().cpu().double().numpy() for value in arguments))
    return torch.as_tensor(values, dtype=torch.float64, device=arguments[-1].device)


_FUNCTIONS: Final[dict[type[Distribution], Callable[[Any, Tensor], Tensor]]] = {
    families.StudentT: _student,
    families.Beta: _beta,
    families.FisherSnedecor: _fisher,
    families.MultivariateNormal: _normal_marginals,
    families.LowRankMultivariateNormal: _normal_marginals,
    families.Poisson: _poisson,
    families.NegativeBinomial: _negative_binomial,
    families.Binomial: _binomial,
    families.Bernoulli: _bernoulli,
    families.Geometric: _geometric,
    families.TransformedDistribution: _transformed,
}
