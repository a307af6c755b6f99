"""The Gaussian posterior with a diagonal plus low-rank covariance; the family of SWAG.

    Σ = V + A Aᵀ,  V = diag(v),  A [D, R]        B = V^(-1/2) A,  BᵀB = W diag(s²) Wᵀ, [R, R]

    θ = μ + V^(1/2) (I + B Bᵀ)^(1/2) ε        (I + B Bᵀ)^(1/2) = I + B W diag(1 / (1 + √(1 + s²))) Wᵀ Bᵀ
    log det Σ = Σ log v + Σ log(1 + s²)       Σ⁻¹ = V^(-1/2) (I - B W diag(1 / (1 + s²)) Wᵀ Bᵀ) V^(-1/2)

Nothing of size D × D is formed. SWAG (Maddox et al. 2019, https://arxiv.org/abs/1902.02476) has v =
½ (mean(θ²) - mean(θ)²) and A = deviations / √(2 (R - 1)).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict, as_rows


@final
@dataclass(frozen=True, repr=False)
class LowRankGaussian(AbstractPosterior):
    """A Gaussian posterior over named weights with covariance V + A Aᵀ.

    The other fields are documented in `AbstractPosterior`.

    Attributes:
        diagonal: v by parameter name, positive, shaped like the mean.
        deviations: The columns of A by parameter name, ``[R, *shape]``.
        prior_precision: δ by parameter name; nan for a method without a prior, whose KL is nan.

    Example:
        >>> q = LowRankGaussian(
        ...     {"w": torch.zeros(2)}, {"w": torch.ones(2)}, {"w": torch.tensor([[2.0, 0.0]])}, {"w": 1.0}, num_data=10
        ... )
        >>> q.variance()["w"]
        tensor([5., 1.])
    """

    mean: TensorDict
    diagonal: TensorDict
    deviations: TensorDict
    prior_precision: dict[str, float]
    num_data: float
    constants: TensorDict = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `PosteriorError` if names or shapes do not match."""
        missing = torch.zeros(0)
        wrong = [
            name
            for name, mean in self.mean.items()
            if self.diagonal.get(name, missing).shape != mean.shape
            or self.deviations.get(name, missing).shape[1:] != mean.shape
        ]
        wrong += sorted({*self.diagonal, *self.deviations} - self.mean.keys())
        if not wrong and len({len(columns) for columns in self.deviations.values()}) > 1:
            wrong = list(self.mean)
        self._require_match("Mean, diagonal, deviations and prior", wrong)

    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + V^(1/2) (I + B Bᵀ)^(1/2) ε."""
        squares, vectors = self._spectrum
        coefficients = self._filtered(vectors, 1 / (1 + (1 + squares).sqrt()), self._projected(noise))
        return {
            name: mean + self.diagonal[name].sqrt() * (noise[name] + _combined(coefficients, self._columns[name]))
            for name, mean in self.mean.items()
        }

    def variance(self) -> TensorDict:
        """V + Σ_r A_r² by parameter name."""
        return {name: v + self.deviations[name].square().sum(0) for name, v in self.diagonal.items()}

    def log_det_precision(self) -> Tensor:
        """-Σ log v - Σ log(1 + s²)."""
        diagonal = torch.stack([v.log().sum() for v in self.diagonal.values()]).sum()
        return -diagonal - torch.log1p(self._spectrum[0]).sum().to(diagonal.dtype)

    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ Σ⁻¹ (θ-μ), by Woodbury's identity."""
        scaled = {name: (weights[name] - mean) * self.diagonal[name].rsqrt() for name, mean in self.mean.items()}
        squares, vectors = self._spectrum
        projected = self._projected(scaled)
        explained = projected @ self._filtered(vectors, 1 / (1 + squares), projected)
        return torch.stack([value.square().sum() for value in scaled.values()]).sum() - explained

    def variance_along(self, directions: TensorDict) -> Tensor:
        """Σ_j v_j d_j² + Σ_r (A_rᵀ d)²."""
        diagonal = [as_rows(d.square() * self.diagonal[name]).sum(1) for name, d in directions.items()]
        projected = [as_rows(d) @ as_rows(self.deviations[name]).mT for name, d in directions.items()]
        return torch.stack(diagonal).sum(0) + torch.stack(projected).sum(0).square().sum(1)

    @cached_property
    def _columns(self) -> TensorDict:
        """B by parameter name, ``[R, *shape]``."""
        return {name: columns * self.diagonal[name].rsqrt() for name, columns in self.deviations.items()}

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """s² and W, in float64."""
        flat = [as_rows(columns).double() for columns in self._columns.values()]
        squares, vectors = torch.linalg.eigh(torch.stack([part @ part.mT for part in flat]).sum(0))
        return squares.clamp_min(0), vectors

    def _projected(self, values: TensorDict) -> Tensor:
        """Bᵀ x, ``[R]``."""
        return torch.stack([as_rows(columns) @ values[n].reshape(-1) for n, columns in self._columns.items()]).sum(0)

    def _filtered(self, vectors: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        """W diag(weights) Wᵀ x."""
        return (vectors @ (weights * (vectors.mT @ x.double()))).to(x.dtype)


def _combined(coefficients: Tensor, columns: Tensor) -> Tensor:
    """Σ_r c_r B_r."""
    return (coefficients @ as_rows(columns)).view(columns.shape[1:])
