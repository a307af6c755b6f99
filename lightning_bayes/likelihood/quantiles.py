"""Outputs that are quantiles of the targets, such as those of a pinball loss.

    combine    the same quantiles of the mixture over samples, F(y) = (1/S) Σ_s F_s(y)

A pinball loss has no curvature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.likelihood.base import OutputLikelihood
from lightning_bayes.likelihood.mixtures import mixture_quantile, observed
from lightning_bayes.likelihood.predictions import Observed


@final
class Quantiles(OutputLikelihood):
    """Reads outputs ``[…, levels]`` as quantiles; targets are ``[…]``.

    Args:
        levels: Increasing probabilities of the columns.

    Raises:
        HyperparameterError: If fewer than two levels are given, or they do not increase between 0 and 1.

    Example:
        >>> Quantiles((0.1, 0.5, 0.9))(torch.tensor([[1.0, 2.0, 3.0]])).mean
        tensor([2.])
    """

    name: ClassVar[str] = "quantiles"

    def __init__(self, levels: Sequence[float]) -> None:
        bounds = [0.0, *levels, 1.0]
        if len(levels) < 2 or any(not low < high for low, high in pairwise(bounds)):
            raise HyperparameterError(
                f"levels={tuple(levels)!r} must be two or more increasing numbers between 0 and 1."
            )
        self.levels = [float(level) for level in levels]

    @property
    def has_noise(self) -> bool:
        """Quantiles determine intervals."""
        return True

    def mean(self, outputs: Tensor) -> Tensor:
        """The mean of the distribution."""
        return self(outputs).mean

    def __call__(self, outputs: Any) -> QuantileDistribution:
        """The distribution of the targets."""
        if not isinstance(outputs, Tensor) or outputs.shape[-1:] != (len(self.levels),):
            shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ShapeError(f"{len(self.levels)} quantiles need as many columns of one tensor, got {shape}.")
        return QuantileDistribution(outputs, outputs.new_tensor(self.levels))

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``nan``: quantiles determine no density."""
        return self(outputs).log_prob(targets)

    def target_shape(self, outputs: Tensor, targets: Tensor) -> tuple[int, ...]:
        """One target for all levels."""
        shape = outputs.shape[:-1]
        return tuple(shape if shape.numel() == targets.numel() else targets.shape)

    def combine(self, outputs: Tensor) -> Tensor:
        """The quantiles of the mixture."""
        distribution = self(outputs.flatten(0, 1))
        columns = [mixture_quantile(distribution, len(outputs), level) for level in self.levels]
        return torch.stack(columns, -1).to(outputs.dtype)

    def summarise(self, outputs: Tensor, interval: float = 0.9) -> Observed:
        """Mean, both variances and the interval of the targets."""
        return observed(self(outputs.flatten(0, 1)), len(outputs), interval)


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
