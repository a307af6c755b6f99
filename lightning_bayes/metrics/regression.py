"""Scores of predictions for real-valued targets, which are mixtures over posterior samples.

    RMSE = sqrt(mean_i (y_i - μ_i)²)           NLL = -mean_i log (1/S) Σ_s p(y_i | x_i, θ_s)  (nats)

Each index i is one target value; for several outputs per example, the means run over examples and outputs. The mixture
averages the density of each target value separately. Some published tables average the joint density of all target values
instead, which is more pessimistic.
"""

from __future__ import annotations

import math
from typing import final

from torch import Tensor

from lightning_bayes.errors import ShapeError
from lightning_bayes.metrics.states import MeanOverExamples


def mixture_nll(log_densities: Tensor) -> Tensor:
    """Negative log of each target's predictive density in nats, from log-densities ``[samples, ...]``: ``[...]``."""
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
class MixtureNLL(MeanOverExamples):
    """Mean negative log-likelihood of a mixture over samples per target value, in nats."""

    def update(self, log_densities: Tensor) -> None:  # type: ignore[override]
        """Add a batch: log-densities of the observed targets under each sample, ``[samples, batch]``."""
        self.add(mixture_nll(log_densities))


@final
class IntervalCoverage(MeanOverExamples):
    """The fraction of targets inside their interval."""

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
    """Root of the mean squared error per target value, in the unit of the target; ignores the variance."""

    def update(self, mean: Tensor, variance: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add a batch of means, variances and observed targets, all of one shape."""
        _check_same_shape(mean, variance, target)
        self.add((target - mean).square())

    def compute(self) -> Tensor:
        """Return the root of the mean over all target values since the last reset; ``nan`` if there were none."""
        return super().compute().sqrt()
