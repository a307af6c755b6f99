"""Distributions of real-valued targets given outputs, where a likelihood tells them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch import distributions as families
from torch.distributions import Distribution

from lightning_bayes.likelihood.base import OutputLikelihood
from lightning_bayes.likelihood.family import Family, Observation
from lightning_bayes.likelihood.gaussian import Gaussian
from lightning_bayes.likelihood.mixtures import grouped, observed
from lightning_bayes.likelihood.names import LinkArgument
from lightning_bayes.likelihood.paths import leaf_at
from lightning_bayes.likelihood.poisson import Poisson
from lightning_bayes.likelihood.predicted_gaussian import PredictedGaussian
from lightning_bayes.likelihood.predictions import Observed
from lightning_bayes.likelihood.quantiles import Quantiles
from lightning_bayes.likelihood.value import Likelihood

__all__ = [
    "LinkArgument",
    "Observation",
    "Observed",
    "Quantiles",
    "log_densities",
    "observation_of",
    "observation_of_likelihood",
    "observed",
]


def log_densities(distribution: Distribution, samples: int, targets: Tensor) -> Tensor:
    """Log p(y | x, θ_s) of each target, ``[samples, examples, …]``."""
    repeated = targets.expand(samples, *targets.shape).flatten(0, 1)
    values: Tensor = distribution.log_prob(repeated)
    return grouped(values, samples)


def observation_of(kind: OutputLikelihood | None) -> Observation | None:
    """The distribution of real-valued targets given outputs that a kind tells; None if it tells none."""
    if isinstance(kind, PredictedGaussian):
        return kind.distribution
    if isinstance(kind, Poisson):
        return lambda output: families.Poisson(kind.rate(output), validate_args=False)
    if isinstance(kind, Gaussian) and kind.std is not None:
        return lambda output: families.Normal(
            output, output.new_tensor(kind.std).expand_as(output), validate_args=False
        )
    return kind.function if isinstance(kind, Family) else kind if isinstance(kind, Quantiles) else None


def observation_of_likelihood(likelihood: Likelihood) -> Observation | None:
    """`observation_of` the only output, as a function of all that ``forward`` returns."""
    scored = likelihood.only
    observation = None if scored is None else observation_of(scored.kind)
    if scored is None or observation is None or scored.paths == ((),):
        return observation
    paths, of_parts = scored.paths, observation

    def of_output(output: Any) -> Distribution:
        parts = tuple(leaf_at(output, path) for path in paths)
        return of_parts(parts if len(parts) > 1 else parts[0])

    return of_output
