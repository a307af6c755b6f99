"""Kronecker-factored curvature of every weight matrix, eigendecomposed, and diagonal curvature.

    weight: O ⊗ I        bias: T O        O = Σ_i Σ_c (1/T) Σ_t δ_it δ_itᵀ        I = (1/N) Σ_i Σ_t a_it a_itᵀ

An example has T positions, as in K-FAC-expand (Eschenhagen et al. 2023, https://arxiv.org/abs/2311.00636). Positions that
only targets that do not count depend on, such as ignored tokens, are no part of I: N is the number of the others over T.
Two backward passes find them, with random gradients of all outputs and of those that count. Parameters
without Kronecker factors use the diagonal, Σ_i Σ_c (J_iᵀ v_ic)²: norms, embeddings and weights tied between layers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.factors import Request, has_factors, input_rows, output_rows
from lightning_bayes.curvature.kronecker import KroneckerCapture, KroneckerEngine, blocks_by_parameter
from lightning_bayes.curvature.measured_modules import find_measured_modules
from lightning_bayes.curvature.output_roots import Columns
from lightning_bayes.curvature.selection import require_measured
from lightning_bayes.linalg import symmetric_eigen
from lightning_bayes.posteriors import EigenGaussian, MeanField
from lightning_bayes.posthoc.batches import Reading
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
        self.num_data: defaultdict[str, float] = defaultdict(float)  # N of each weight

    @override
    def measure(self, forward: Reading, columns: Columns) -> None:
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
                self.num_data[name] += len(outputs)
            else:
                square = captured.squares.get(param, torch.zeros_like(param))
                self.squares[name] = square + self.squares.get(name, 0)
        counts = forward.counted if self.layers else None
        if counts is not None:
            self._leave_out(forward, counts)

    def _leave_out(self, forward: Reading, counts: Tensor) -> None:
        """Take the inputs of positions that no counted target depends on out of the factors of this batch."""
        calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        names = {id(param): name for name, param in self.params.items()}
        layers = [layer for layer in self.layers if names.get(id(layer.weight)) in self.factors]
        hooks = [
            layer.register_forward_hook(lambda *call: calls.append((call[0], call[1][0], call[2]))) for layer in layers
        ]
        try:
            outputs = forward()
        finally:
            for hook in hooks:
                hook.remove()
        generator = torch.Generator(outputs.device).manual_seed(0)
        probe = 1 + torch.rand(outputs.shape, generator=generator, device=outputs.device).to(outputs.dtype)
        of_layers = [output for _, _, output in calls]
        gradients = [
            torch.autograd.grad(outputs, of_layers, each, retain_graph=True, allow_unused=True, materialize_grads=True)
            for each in (probe, probe * counts)
        ]
        for (layer, x, _), of_all, of_counted in zip(calls, *gradients, strict=True):
            reached, counted = ((output_rows(layer, gradient) != 0).any(-1) for gradient in (of_all, of_counted))
            rows, left_out = input_rows(layer, x.detach(), bias=False), reached & ~counted
            name = names[id(layer.weight)]
            self.factors[name][1] -= (rows * left_out[..., None]).mT @ rows
            self.num_data[name] -= float(left_out.double().mean()) * len(outputs)

    @cached_property
    def _spectra(self) -> dict[str, _Spectrum]:
        """The eigendecompositions by name. The factors are freed."""
        spectra = {}
        for name in list(self.factors):
            parts = [symmetric_eigen(factor, f"curvature factor of {name}") for factor in self.factors.pop(name)]
            left = parts[0][0]
            right = left.new_ones(1)
            if len(parts) == 2:  # rounding may leave less than 0 of inputs that are left out
                right = parts[1][0].clamp_min(0) / self.num_data[name]
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
