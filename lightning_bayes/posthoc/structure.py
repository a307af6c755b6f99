"""The curvature of a data set in one structure, and the posterior that it makes with a prior.

    G = Σ_i J_iᵀ H_i J_i  over all examples        Σ⁻¹ = c G + diag(δ)

c is 1, or what the noise of a regression makes of the curvature that was measured at σ = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from lightning_bayes.curvature.output_roots import Columns
from lightning_bayes.posteriors import AbstractPosterior

Prior: TypeAlias = dict[str, Tensor]  # δ by parameter name, scalars


class AbstractStructure(ABC):
    """Adds the curvature of batches up.

    Args:
        model: The model, in evaluation mode.
        params: The parameters of the posterior by name, the only ones that require gradients while batches are measured.
    """

    def __init__(self, model: nn.Module, params: dict[str, nn.Parameter]) -> None:
        self.model, self.params = model, params

    @abstractmethod
    def measure(self, forward: Callable[[], Tensor], columns: Columns) -> Tensor:
        """Add one batch.

        Args:
            forward: Computes the model's outputs, ``[B, …]``.
            columns: Columns of a root of the curvature in the outputs.

        Returns:
            The outputs, detached.
        """

    @abstractmethod
    def log_det(self, prior: Prior, factor: Tensor) -> Tensor:
        """Log det (c G + diag(δ)), a scalar in float64, differentiable in both.

        Args:
            prior: δ.
            factor: c.
        """

    @abstractmethod
    def posterior(
        self, prior: dict[str, float], factor: float, num_data: int, constants: dict[str, Tensor]
    ) -> AbstractPosterior:
        """The Gaussian around the present weights.

        Args:
            prior: δ by parameter name.
            factor: c.
            num_data: N.
            constants: Other tensors that a prediction needs.
        """

    @property
    def mean(self) -> dict[str, Tensor]:
        """Copies of the weights."""
        return {name: param.detach().clone() for name, param in self.params.items()}
