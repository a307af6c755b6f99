"""The full curvature matrix, for last layers and small models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.example_gradients import Contribution, dense, watched_examples
from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.curvature.output_roots import Columns
from lightning_bayes.curvature.selection import require_measured
from lightning_bayes.linalg import symmetric_eigen
from lightning_bayes.posteriors import FullGaussian, require_memory
from lightning_bayes.posteriors.base import as_rows
from lightning_bayes.posthoc.batches import Reading
from lightning_bayes.posthoc.structure import AbstractStructure, Prior

LIMIT_MIB = 1024.0  # largest D × D matrix: D = 16 384 in single precision


def require_full_size(params: Mapping[str, Tensor]) -> int:
    """Return the number D of weights; raise a `PosteriorError` if a D × D matrix is too large."""
    size = sum(param.numel() for param in params.values())
    bytes_each = max(param.element_size() for param in params.values())
    subject = f"structure='full' of {size:,} parameters, {size:,} × {size:,} numbers,"
    alternatives = "structure='kronecker' or 'diagonal', or subset='last_layer'"
    require_memory(subject, size**2, bytes_each, LIMIT_MIB, alternatives)
    return size


@final
class Full(AbstractStructure):
    """Σ_i Σ_c (J_iᵀ v_ic)(J_iᵀ v_ic)ᵀ; arguments as in `AbstractStructure`."""

    def __init__(self, model: nn.Module, params: dict[str, nn.Parameter]) -> None:
        super().__init__(model, params)
        size = require_full_size(params)
        self.engine = FusedEngine(model, "sum")
        self.matrix = next(iter(params.values())).new_zeros(size, size).detach()

    @override
    def measure(self, forward: Reading, columns: Columns) -> None:
        rows: dict[nn.Parameter, Tensor] = {}

        def receive(param: nn.Parameter, contribution: Contribution) -> None:
            rows[param] = dense(param, contribution)

        with watched_examples(self.engine, receive) as captured:
            outputs = forward()
            require_measured(self.engine, captured, outputs, self.params)
            for column in columns(outputs):
                captured.backward(outputs, column)
                self._add(rows, len(outputs))
                rows.clear()

    def _add(self, rows: dict[nn.Parameter, Tensor], examples: int) -> None:
        blocks = [
            as_rows(rows[p]) if p in rows else p.new_zeros(examples, p.numel()).detach() for p in self.params.values()
        ]
        jacobian = torch.cat(blocks, 1)
        self.matrix.addmm_(jacobian.mT, jacobian)

    @cached_property
    def _eigenvalues(self) -> Tensor:
        return symmetric_eigen(self.matrix.double(), "curvature matrix")[0]

    def log_det(self, prior: Prior, factor: Tensor) -> Tensor:
        """One shared prior precision uses eigenvalues, otherwise a Cholesky factor."""
        is_shared = len({id(delta) for delta in prior.values()}) == 1
        # A search evaluates many precisions, so the more expensive eigenvalues pay off. A single value uses Cholesky.
        is_search = torch.is_grad_enabled()
        if is_shared and (is_search or "_eigenvalues" in vars(self)):
            return (factor * self._eigenvalues + next(iter(prior.values()))).log().sum()
        precision = self._precision(prior, factor.double())
        # In place to save memory (200 MiB for ResNet-18's last layer); this needs contiguous columns.
        target = None if precision.requires_grad else precision.mT
        root: Tensor = torch.linalg.cholesky(precision.mT, out=target)
        return 2 * root.diagonal().log().sum()

    def posterior(self, prior: dict[str, float], factor: float, num_data: int) -> FullGaussian:
        """P = c G + diag(δ)."""
        deltas = {name: self.matrix.new_tensor(delta) for name, delta in prior.items()}
        precision = self._precision(deltas, self.matrix.new_tensor(factor))
        return FullGaussian(self.mean, precision, prior, num_data, self.constants)

    def _precision(self, prior: Prior, factor: Tensor) -> Tensor:
        """Return c G + diag(δ), in the dtype of `factor`."""
        precision = self.matrix.to(factor.dtype, copy=True).mul_(factor)
        precision.diagonal().add_(torch.cat([prior[name].expand(p.numel()) for name, p in self.params.items()]))
        return precision
