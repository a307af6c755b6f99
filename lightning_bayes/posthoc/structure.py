"""Interface of curvature structures: accumulate the curvature of a data set, and build a posterior from it and a prior.

    G = Σ_i J_iᵀ H_i J_i  over all examples        Σ⁻¹ = c G + diag(δ)

c is 1 for classification. For regression, c converts the curvature measured at σ = 1 to the noise σ; see `Evidence`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

from torch import Tensor, nn

from lightning_bayes.curvature.output_roots import Columns
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.posthoc.batches import Reading

Prior: TypeAlias = dict[str, Tensor]  # δ by parameter name, scalars


class AbstractStructure(ABC):
    """Sums the curvature of batches."""

    def __init__(self, model: nn.Module, params: dict[str, nn.Parameter]) -> None:
        self.model, self.params = model, params

    @abstractmethod
    def measure(self, forward: Reading, columns: Columns) -> None:
        """Add one batch."""

    @abstractmethod
    def log_det(self, prior: Prior, factor: Tensor) -> Tensor:
        """Return log det (c G + diag(δ)), a float64 scalar that is differentiable in δ (`prior`) and c (`factor`)."""

    @abstractmethod
    def posterior(self, prior: dict[str, float], factor: float, num_data: int) -> AbstractPosterior:
        """Build the Gaussian around the current weights."""

    @property
    def mean(self) -> dict[str, Tensor]:
        """Copies of the weights."""
        return {name: param.detach().clone() for name, param in self.params.items()}

    @property
    def constants(self) -> dict[str, Tensor]:
        """Copies of the model's other tensors, which prediction needs, such as buffers."""
        state = self.model.state_dict().items()
        return {
            name: value.detach().clone()
            for name, value in state
            if name not in self.params and isinstance(value, Tensor)
        }
