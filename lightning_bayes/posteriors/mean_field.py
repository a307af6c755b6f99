"""The mean-field Gaussian posterior q(θ) = Π_j N(θ_j; μ_j, 1/P_j) with the prior p(θ) = Π_j N(θ_j; μ₀_j, 1/δ_j)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict, as_rows, scaled_squares


@final
@dataclass(frozen=True, repr=False)
class MeanField(AbstractPosterior):
    """A Gaussian posterior over named weights, independent across weights.

    The other fields are documented in `AbstractPosterior`.

    Attributes:
        precision: P = 1/Σ by parameter name, positive, shaped like the mean.

    Example:
        >>> q = MeanField({"w": torch.zeros(2)}, {"w": torch.full((2,), 4.0)}, {"w": 1.0}, num_data=10)
        >>> q.std["w"], round(q.entropy().item(), 4), round(q.kl().item(), 4)
        (tensor([0.5000, 0.5000]), 1.4516, 0.6363)
    """

    mean: TensorDict
    precision: TensorDict
    prior_precision: Mapping[str, float | Tensor]
    num_data: float
    constants: TensorDict = field(default_factory=dict)
    prior_mean: TensorDict = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `PosteriorError` if names or shapes do not match."""
        wrong = [
            name
            for name, mean in self.mean.items()
            if self.precision.get(name, mean.new_zeros(0)).shape != mean.shape
            or (isinstance(delta := self.prior_precision.get(name), Tensor) and delta.shape != mean.shape)
        ]
        self._require_match("Mean, precision and prior", wrong + sorted(self.precision.keys() - self.mean.keys()))

    @property
    def std(self) -> TensorDict:
        """√Σ by parameter name."""
        return {name: precision.rsqrt() for name, precision in self.precision.items()}

    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + ε/√P."""
        return {name: mean + noise[name] * self.precision[name].rsqrt() for name, mean in self.mean.items()}

    def variance(self) -> TensorDict:
        """1/P by parameter name."""
        return {name: precision.reciprocal() for name, precision in self.precision.items()}

    def log_det_precision(self) -> Tensor:
        """Σ_j log P_j."""
        return torch.stack([precision.log().sum() for precision in self.precision.values()]).sum()

    def squared_distance(self, weights: TensorDict) -> Tensor:
        """Σ_j P_j (θ_j - μ_j)²."""
        terms = [(p * (weights[name] - self.mean[name]).square()).sum() for name, p in self.precision.items()]
        return torch.stack(terms).sum()

    def blocks(self) -> list[list[str]]:
        """One block per parameter."""
        return [[name] for name in self.mean]

    def variance_along(self, directions: TensorDict) -> Tensor:
        """Σ_j d_j²/P_j."""
        terms = [as_rows(d.square() / self.precision[name]).sum(1) for name, d in directions.items()]
        return torch.stack(terms).sum(0)

    def variance_along_rows(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Σ_jk (Σ_t left_tj right_tk)²/P_jk."""
        return scaled_squares(left, right, self.precision[name].flatten(1))


def marginals(posterior: AbstractPosterior, names: Collection[str]) -> MeanField:
    """The marginals of the named parameters: a mean-field posterior with the same means and variances."""
    return MeanField(
        {name: posterior.mean[name] for name in names},
        {name: variance.reciprocal() for name, variance in posterior.variance().items() if name in names},
        {name: posterior.prior_precision[name] for name in names},
        posterior.num_data,
        prior_mean={name: mean for name, mean in posterior.prior_mean.items() if name in names},
    )
