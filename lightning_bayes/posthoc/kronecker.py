"""Kronecker-factored curvature of every weight matrix, eigendecomposed, and diagonal curvature.

    weight: O ⊗ I        bias: T O        O = Σ_i Σ_c (1/T) Σ_t δ_it δ_itᵀ        I = (1/N) Σ_i Σ_t a_it a_itᵀ

An example has T positions, as in K-FAC-expand (Eschenhagen et al. 2023, https://arxiv.org/abs/2311.00636). Parameters
without Kronecker factors use the diagonal, Σ_i Σ_c (J_iᵀ v_ic)²: norms, embeddings and weights tied between layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.factors import Request, has_factors
from lightning_bayes.curvature.kronecker import KroneckerCapture, KroneckerEngine, blocks_by_parameter
from lightning_bayes.curvature.measured_modules import find_measured_modules
from lightning_bayes.curvature.output_roots import Columns
from lightning_bayes.curvature.selection import require_measured
from lightning_bayes.linalg import symmetric_eigen
from lightning_bayes.posteriors import EigenGaussian, MeanField
from lightning_bayes.posthoc.structure import AbstractStructure, Prior


class _Spectrum(NamedTuple):
    """Eigendecomposition of one parameter's curvature."""

    bases: tuple[Tensor, ...]  # eigenvectors of each factor
    values: Tensor  # eigenvalues of the product, [out, K], or [groups, out / groups, K]; K = 1 for a bias


@final
class Kronecker(AbstractStructure):
    """Sums the Kronecker factors of all batches; `diagonal` uses none. Other arguments as in `AbstractStructure`."""

    def __init__(self, model: nn.Module, params: dict[str, nn.Parameter], *, diagonal: bool = False) -> None:
        super().__init__(model, params)
        self.engine = KroneckerEngine(model, "sum")
        self.diagonal = diagonal
        self.layers = {} if diagonal else dict(_layers_with_factors(model))
        self.factors: dict[str, list[Tensor]] = {}
        self.squares: dict[str, Tensor] = {}
        self.num_data = 0

    @override
    def measure(self, forward: Callable[[], Tensor], columns: Columns) -> Tensor:
        with self.engine.capture(Request(self.layers)) as captured:
            assert isinstance(captured, KroneckerCapture)
            outputs = forward()
            require_measured(self.engine, captured, outputs, self.params)
            counted = Counter[str]()
            captured.measure_columns(outputs, _counted(columns(outputs), counted))
        # The capture averages over examples and columns, but the curvature is a sum over both.
        weights = (len(outputs) * counted["columns"], len(outputs))
        blocks = blocks_by_parameter(captured)
        for name, param in self.params.items():
            if param in blocks:
                parts = [factor * weight for factor, weight in zip(blocks[param].factors, weights, strict=False)]
                _add(self.factors.setdefault(name, []), parts)
            else:
                square = captured.squares.get(param, torch.zeros_like(param))
                self.squares[name] = square + self.squares.get(name, 0)
        self.num_data += len(outputs)
        return outputs.detach()

    @cached_property
    def _spectra(self) -> dict[str, _Spectrum]:
        """The eigendecompositions by name. The factors are freed."""
        spectra = {}
        for name in list(self.factors):
            parts = [symmetric_eigen(factor, f"curvature factor of {name}") for factor in self.factors.pop(name)]
            left = parts[0][0]
            right = parts[1][0] / self.num_data if len(parts) == 2 else left.new_ones(1)
            values = left[..., :, None] * right[..., None, :]
            spectra[name] = _Spectrum(tuple(vectors for _, vectors in parts), values)
        return spectra

    def log_det(self, prior: Prior, factor: Tensor) -> Tensor:
        """Σ log (c λ_O λ_I + δ) + Σ log (c s + δ)."""
        values = {**self.squares, **{name: spectrum.values for name, spectrum in self._spectra.items()}}
        terms = [(factor * value.double() + prior[name]).log().sum() for name, value in values.items()]
        return torch.stack(terms).sum()

    def posterior(self, prior: dict[str, float], factor: float, num_data: int) -> EigenGaussian | MeanField:
        """D = c λ_O λ_I + δ, and c s + δ without factors."""
        precision = {name: factor * square + prior[name] for name, square in self.squares.items()}
        if self.diagonal:
            return MeanField(self.mean, precision, prior, num_data, self.constants)
        bases = {name: spectrum.bases for name, spectrum in self._spectra.items()}
        values = {name: factor * spectrum.values + prior[name] for name, spectrum in self._spectra.items()}
        return EigenGaussian(self.mean, bases, values, precision, prior, num_data, self.constants)


def _layers_with_factors(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Layers that have Kronecker factors and share no parameter, and whether the bias is trained."""
    units = find_measured_modules(model)
    owners = Counter(param for unit in units for param in unit.module.parameters())
    for unit in units:
        if has_factors(unit.module) and all(owners[param] == 1 for param in unit.module.parameters()):
            bias = unit.module.bias
            yield unit.module, isinstance(bias, nn.Parameter) and bias.requires_grad


def _counted(columns: Iterator[Tensor], counter: Counter[str]) -> Iterator[Tensor]:
    for column in columns:
        counter["columns"] += 1
        yield column


def _add(total: list[Tensor], parts: list[Tensor]) -> None:
    if not total:
        total.extend(parts)
    else:
        for sum_, part in zip(total, parts, strict=True):
            sum_ += part
