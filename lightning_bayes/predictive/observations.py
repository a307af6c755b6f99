"""Distributions of real-valued targets given a network's outputs, and predictions with their noise.

p(y | x) ≈ (1/S) Σ_s p(y | f(x, θ_s))        Var y = E_s Var[y | θ_s] + Var_s E[y | θ_s]
aleatoric          epistemic

`mixture_output` is one output that represents the mixture over samples, E[y] = mean_s μ_s and, by the law of total variance,
Var[y] = mean_s σ²_s + Var_s μ_s. An average of raw outputs would leave out Var_s μ_s, and average log-variances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal, constraints

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.predictive.links import LikelihoodName, Link, find_link
from lightning_bayes.predictive.quantiles import grouped, mixture_quantile

Observation: TypeAlias = Callable[[Any], Distribution]  # from a model's output to the distribution of its targets

ObservationName: TypeAlias = Literal["mean_variance", "mean_log_variance", "mean_std"]
LinkArgument: TypeAlias = LikelihoodName | ObservationName | Observation


class Observed(NamedTuple):
    """A prediction of targets with noise. All values are ``[B, …]``."""

    mean: Tensor  # of the target
    aleatoric: Tensor  # variance of the noise, averaged over samples
    epistemic: Tensor  # variance of the mean over samples
    lower: Tensor  # ends of the central interval
    upper: Tensor


def observed(distribution: Distribution, samples: int, interval: float = 0.9) -> Observed:
    """Mean, variances and central interval of each target under the mixture over samples, with batch ``[S · B, …]``."""
    if not 0 < interval < 1:
        raise HyperparameterError(f"interval={interval!r} must be a probability between 0 and 1, such as 0.9.")
    means, variances = (grouped(value, samples) for value in (distribution.mean, distribution.variance))
    ends = (mixture_quantile(distribution, samples, (1 + sign * interval) / 2).to(means.dtype) for sign in (-1, 1))
    return Observed(means.mean(0), variances.mean(0), means.var(0, correction=0), *ends)


def log_densities(distribution: Distribution, samples: int, targets: Tensor) -> Tensor:
    """Log p(y | x, θ_s) of each target, ``[samples, examples, …]``."""
    repeated = targets.expand(samples, *targets.shape).flatten(0, 1)
    values: Tensor = distribution.log_prob(repeated)
    return grouped(values, samples)


def mean_variance(output: Any) -> Normal:
    """N(mean, variance), from outputs ``[…, 2 k]``, the means of k targets and then their variances, or from a pair."""
    mean, variance = _pair(output)
    return Normal(mean, variance.clamp_min(1e-12).sqrt(), validate_args=False)


def mean_log_variance(output: Any) -> Normal:
    """N(mean, exp(log variance)); see `mean_variance`."""
    mean, log_variance = _pair(output)
    return Normal(mean, (log_variance / 2).exp(), validate_args=False)


def mean_std(output: Any) -> Normal:
    """N(mean, std²); see `mean_variance`."""
    mean, std = _pair(output)
    return Normal(mean, std.clamp_min(1e-12), validate_args=False)


def _pair(output: Any) -> tuple[Tensor, Tensor]:
    if isinstance(output, Tensor) and output.dim() and output.shape[-1] % 2 == 0:
        one, other = output.chunk(2, -1)
        return (one.squeeze(-1), other.squeeze(-1)) if one.shape[-1] == 1 else (one, other)
    if isinstance(output, (tuple, list)) and len(output) == 2:
        return output[0], output[1]
    shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    raise ShapeError(
        f"A mean and a variance need a pair of tensors, or a tensor of an even number of columns, got {shape}."
    )


_OBSERVATIONS: Final[dict[str, Observation]] = {
    "mean_variance": mean_variance,
    "mean_log_variance": mean_log_variance,
    "mean_std": mean_std,
}


def find_observation(link: LinkArgument) -> tuple[Link, Observation | None]:
    """The link of an argument, and the distribution of targets given outputs, if it states one."""
    if callable(link):
        return "identity", link
    if link in _OBSERVATIONS:
        return "identity", _OBSERVATIONS[link]
    return find_link(link), None


@final
class Quantiles:
    """Reads outputs ``[…, levels]`` as quantiles, such as those of a pinball loss.

    Args:
        levels: Increasing probabilities of the columns.

    Raises:
        HyperparameterError: If fewer than two levels are given, or they do not increase between 0 and 1.

    Example:
        >>> Quantiles((0.1, 0.5, 0.9))(torch.tensor([[1.0, 2.0, 3.0]])).mean
        tensor([2.])
    """

    def __init__(self, levels: Sequence[float]) -> None:
        bounds = [0.0, *levels, 1.0]
        if len(levels) < 2 or any(not low < high for low, high in pairwise(bounds)):
            raise HyperparameterError(
                f"levels={tuple(levels)!r} must be two or more increasing numbers between 0 and 1."
            )
        self.levels = tuple(map(float, levels))

    def __call__(self, output: Any) -> QuantileDistribution:
        """The distribution of the targets."""
        if not isinstance(output, Tensor) or output.shape[-1:] != (len(self.levels),):
            shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ShapeError(f"{len(self.levels)} quantiles need as many columns of one tensor, got {shape}.")
        return QuantileDistribution(output, output.new_tensor(self.levels))


@final
class QuantileDistribution(Distribution):
    """Linear between sorted quantiles ``[…, K]``; all mass outside lies at the first and the last."""

    arg_constraints: ClassVar[dict[str, Any]] = {}
    support = constraints.real

    def __init__(self, values: Tensor, levels: Tensor) -> None:
        self.values, self.levels = values.sort(-1).values, levels
        super().__init__(values.shape[:-1], validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The mean."""
        return self._moment(lambda low, high: (low + high) / 2)

    @property
    def variance(self) -> Tensor:
        """The variance."""
        square = self._moment(lambda low, high: (low.square() + low * high + high.square()) / 3)
        return (square - self.mean.square()).clamp_min(0)

    def _moment(self, of_piece: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        values, levels = self.values, self.levels
        inner = (levels.diff() * of_piece(values[..., :-1], values[..., 1:])).sum(-1)
        first, last = values[..., 0], values[..., -1]
        total: Tensor = inner + levels[0] * of_piece(first, first) + (1 - levels[-1]) * of_piece(last, last)
        return total

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y ≤ value)."""
        values, levels = self.values.to(value.dtype), self.levels.to(value.dtype)
        share = (value[..., None] - values[..., :-1]) / values.diff(dim=-1).clamp_min(1e-300)
        inside: Tensor = levels[0] + (levels.diff() * share.clamp(0, 1)).sum(-1)
        below, above = value < values[..., 0], value >= values[..., -1]
        return torch.where(below, torch.zeros_like(inside), torch.where(above, torch.ones_like(inside), inside))

    def log_prob(self, value: Tensor) -> Tensor:
        """``nan``: quantiles determine no density."""
        return torch.full_like(value, math.nan)


class Form(NamedTuple):
    """How the second half of an output's columns states the variance; the first half is the mean."""

    read: Callable[[Tensor], Tensor]  # to the variance
    write: Callable[[Tensor], Tensor]  # from it


_FORMS: Final = (  # variance, log-variance, standard deviation, and its logarithm
    Form(lambda v: v, lambda v: v),
    Form(torch.exp, torch.log),
    Form(torch.square, torch.sqrt),
    Form(lambda v: (2 * v).exp(), lambda v: v.log() / 2),
)


def form_of(outputs: Tensor, mean: Tensor, variance: Tensor) -> Form | None:
    """The form of outputs ``[S, …, 2 k]`` whose distributions have these moments, of as many values; None for another."""
    if outputs.shape[-1] % 2 or mean.numel() * 2 != outputs.numel():
        return None
    first, second = outputs.chunk(2, -1)
    if not torch.allclose(first, mean.reshape(first.shape), rtol=1e-4, atol=1e-6):
        return None
    spread = variance.reshape(first.shape)
    return next((f for f in _FORMS if torch.allclose(f.read(second), spread, rtol=1e-3, atol=2e-6)), None)


def mixture_output(outputs: Tensor, form: Form) -> Tensor:
    """Mean and variance of the mixture over the first dimension of outputs ``[S, …, 2 k]``, in the form of one output."""
    means, second = outputs.chunk(2, -1)
    variance = form.read(second).mean(0) + means.var(0, correction=0)
    return torch.cat([means.mean(0), form.write(variance)], -1)
