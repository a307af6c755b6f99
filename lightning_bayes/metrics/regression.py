"""Scores of predictions for real-valued targets: Gaussians, or mixtures over posterior samples.

    RMSE = sqrt(mean_i (y_i - μ_i)²)           NLL = mean_i ½ [log(2π σ_i²) + (y_i - μ_i)² / σ_i²]  (nats)

    NLL of a mixture = -mean_i log (1/S) Σ_s p(y_i | x_i, θ_s)

Each index i is one target value; for several outputs per example, the means run over examples and outputs. The mixture
averages the density of each target value separately. Some published tables average the joint density of all target values
instead, which is more pessimistic.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.metrics.states import MeanOverExamples


def gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """Negative log-density of each target under its own Gaussian, in nats.

    Args:
        mean: Predicted means, any shape.
        variance: Predicted variances of the targets, including observation noise, the same shape.
        targets: Observed values, the same shape.

    Returns:
        One value per target value, the same shape; negative where the density exceeds one.

    Raises:
        HyperparameterError: If a variance is not positive.

    Example:
        >>> gaussian_nll(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.0]))
        tensor([1.4189])
    """
    _check_same_shape(mean, variance, targets)
    if not bool((variance > 0).all()):
        raise HyperparameterError(
            f"A Gaussian needs positive variances, but the smallest is {variance.min():.4g}. "
            "Add the variance of the observation noise, or predict log-variances."
        )
    return (math.log(2 * math.pi) + torch.log(variance) + (targets - mean).square() / variance) / 2


def mixture_nll(log_densities: Tensor) -> Tensor:
    """Negative log of each target's predictive density, averaged over samples, in nats.

    Args:
        log_densities: log p(y | x, θ_s) of each target value under each posterior sample, ``[samples, ...]``.

    Returns:
        One value per target value, ``[...]``.

    Raises:
        ShapeError: If there are no samples.

    Example:
        >>> mixture_nll(torch.tensor([[0.5], [0.1]]).log())  # -log 0.3
        tensor([1.2040])
    """
    if log_densities.dim() == 0 or len(log_densities) == 0:
        raise ShapeError(
            f"log_densities has shape {list(log_densities.shape)}; expected [samples, ...] with at least one sample."
        )
    return math.log(len(log_densities)) - log_densities.logsumexp(0)


def _check_same_shape(mean: Tensor, variance: Tensor, targets: Tensor) -> None:
    if not mean.shape == variance.shape == targets.shape:
        raise ShapeError(
            f"Mean {list(mean.shape)}, variance {list(variance.shape)} and targets {list(targets.shape)} must have the "
            "same shape, because broadcasting would pair every example with every other. Use squeeze(-1) or unsqueeze(-1)."
        )


@final
class GaussianNLL(MeanOverExamples):
    """Mean negative log-likelihood of Gaussian predictions per target value, in nats (see `gaussian_nll`)."""

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add a batch of means, variances and observed targets, all of one shape."""
        self.add(gaussian_nll(mean, variance, target))


@final
class MixtureNLL(MeanOverExamples):
    """Mean negative log-likelihood of a mixture over samples per target value, in nats (see `mixture_nll`)."""

    def update(self, log_densities: Tensor) -> None:  # type: ignore[override]
        """Add a batch: log-densities of the observed targets under each sample, ``[samples, batch]``."""
        self.add(mixture_nll(log_densities))


@final
class IntervalCoverage(MeanOverExamples):
    """The share of targets inside their interval.

    Example:
        >>> metric = IntervalCoverage()
        >>> metric(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 2.0]))
        tensor(0.5000)
    """

    def update(self, lower: Tensor, upper: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add a batch of intervals and observed targets, all of one shape."""
        _check_same_shape(lower, upper, target)
        self.add(((lower <= target) & (target <= upper)).float())


@final
class IntervalWidth(MeanOverExamples):
    """The mean width of intervals, in the unit of the target."""

    def update(self, lower: Tensor, upper: Tensor) -> None:  # type: ignore[override]
        """Add a batch of intervals."""
        self.add(upper - lower)


@final
class RootMeanSquaredError(MeanOverExamples):
    """Root of the mean squared error per target value, in the unit of the target.

    ``update`` accepts and ignores a variance, so that one call updates this metric and `GaussianNLL`.

    Example:
        >>> metric = RootMeanSquaredError()
        >>> metric(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([3.0, 4.0]))
        tensor(3.5355)
    """

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add a batch of means, variances and observed targets, all of one shape."""
        _check_same_shape(mean, variance, target)
        self.add((target - mean).square())

    def compute(self) -> Tensor:
        """Return the root of the mean over all target values since the last reset; ``nan`` if there were none."""
        return super().compute().sqrt()
