"""Diagonal curvature, which gives a mean-field posterior."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.factors import Request
from lightning_bayes.curvature.kronecker import KroneckerCapture, KroneckerEngine
from lightning_bayes.curvature.output_roots import Columns
from lightning_bayes.curvature.selection import require_measured
from lightning_bayes.posteriors import MeanField
from lightning_bayes.posthoc.structure import AbstractStructure, Prior


@final
class Diagonal(AbstractStructure):
    """Element-wise Σ_i Σ_c (J_iᵀ v_ic)²; arguments as in `AbstractStructure`."""

    def __init__(self, model: nn.Module, params: dict[str, nn.Parameter]) -> None:
        super().__init__(model, params)
        self.engine = KroneckerEngine(model, "sum")
        self.squares = {name: torch.zeros_like(param) for name, param in params.items()}

    def measure(self, forward: Callable[[], Tensor], columns: Columns) -> Tensor:
        """Add one batch; see `AbstractStructure.measure`."""
        with self.engine.capture(Request({})) as captured:
            assert isinstance(captured, KroneckerCapture)
            outputs = forward()
            require_measured(self.engine, captured, outputs, self.params)
            captured.measure_columns(outputs, columns(outputs))
        for name, param in self.params.items():
            self.squares[name] += captured.squares.get(param, 0)
        return outputs.detach()

    def log_det(self, prior: Prior, factor: Tensor) -> Tensor:
        """Σ log (c s + δ); see `AbstractStructure.log_det`."""
        terms = [(factor * square.double() + prior[name]).log().sum() for name, square in self.squares.items()]
        return torch.stack(terms).sum()

    def posterior(
        self, prior: dict[str, float], factor: float, num_data: int, constants: dict[str, Tensor]
    ) -> MeanField:
        """1/Σ = c s + δ; see `AbstractStructure.posterior`."""
        precision = {name: factor * square + prior[name] for name, square in self.squares.items()}
        return MeanField(self.mean, precision, prior, num_data, constants)
