"""Curvature over all weights: Hessian, outer products of per-example gradients, Kronecker factors of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature import Capture, GradientEngine, LossReduction
from lightning_bayes.curvature.factors import ExampleRows, LayerRows, Request
from lightning_bayes.curvature.hessian import HessianCapture
from lightning_bayes.curvature.kronecker import KroneckerEngine
from lightning_bayes.errors import ShapeError, UnsupportedLayerError
from lightning_bayes.likelihood import OutputLikelihood
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator, Scores
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass
from lightning_bayes.optim.fisher import FisherName, check_fisher, label_source
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer, partition_layers


@final
class HessianMeasurement(CurvatureEstimator):
    """The exact Hessian, ``[D, D]``."""

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter], loss_reduction: LossReduction) -> None:
        self.engine = GradientEngine(model, loss_reduction, partial(HessianCapture, list(params)))

    def capture(self, label_seed: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """Open the capture of a pass, which samples no labels."""
        return self.engine.capture()

    @override
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        return {0: finished.captured.mean_hessian() / finished.loss_scale}


class RowsMeasurement(CurvatureEstimator):
    """Curvature from the inputs and output gradients of all examples in linear layers and convolutions without groups."""

    engine: KroneckerEngine

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        optimizer: str,
        fisher: FisherName | None,
        likelihood: OutputLikelihood | None,
        loss_reduction: LossReduction,
    ) -> None:
        check_fisher(fisher)
        self._label_source = partial(label_source, fisher, likelihood, model)
        self._label_source()  # raises if it cannot be sampled
        self.layers = require_matrix_layers(model, params, optimizer)
        self.engine = KroneckerEngine(model, loss_reduction, records=ExampleRows)

    def capture(self, label_seed: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """Open a capture of the rows of all layers."""
        layers = {layer.module: layer.has_bias for layer in self.layers}
        return self.engine.capture(Request(layers, self._label_source(), label_seed, loss_scale))

    def degree_of(self, key: Any) -> int:
        """The gradients of sampled labels do not depend on the loss."""
        return 2 if self._label_source() is None else 0

    def _rows(self, captured: Any) -> list[LayerRows]:
        """The rows of each layer; zeros for layers that the backward pass did not reach."""
        rows: dict[nn.Module, LayerRows] = captured.results()
        examples = len(next(iter(rows.values())).inputs)
        return [rows.get(layer.module) or _zero_rows(layer, examples) for layer in self.layers]


@final
class OuterProducts(RowsMeasurement):
    """The mean of g_i g_iᵀ, ``[D, D]``."""

    @override
    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        grads: dict[nn.Parameter, Tensor] = {}
        for layer, rows in zip(self.layers, self._rows(finished.captured), strict=True):
            joined = rows.example_gradients()  # [examples, out, K]
            grads[layer.weight] = (joined[..., :-1] if layer.has_bias else joined).flatten(1)
            if layer.has_bias:
                grads[layer.params[1]] = joined[..., -1]
        return {0: outer_products(torch.cat([grads[param] for param in params], 1))}


@final
class ChainFactors(RowsMeasurement):
    """S and A of each layer, then of each pair of neighbours."""

    def degree_of(self, key: Any) -> int:
        """Inputs do not depend on the loss."""
        return 0 if key % 2 else super().degree_of(key)

    def read(self, finished: FinishedPass, params: Sequence[nn.Parameter], scores: Scores) -> Curvature:
        """Read the factors; raises `ShapeError` for layers with several positions per example."""
        rows = self._rows(finished.captured)
        several = [layer.name for layer, row in zip(self.layers, rows, strict=True) if row.inputs.shape[1] > 1]
        if several:
            raise ShapeError(
                f"The curvature between two layers requires one position per example, but {', '.join(several)} had several, "
                "or was called several times. Use NoisyKFAC for such layers."
            )
        pairs = [*zip(rows, rows, strict=True), *pairwise(rows)]
        return dict(enumerate(factor for pair in pairs for factor in _moments(*pair)))


JointMeasurement: TypeAlias = HessianMeasurement | RowsMeasurement  # by the keys 0, 1 and so on


def outer_products(grads: Tensor) -> Tensor:
    """Return the mean of g_i g_iᵀ, ``[..., D, D]``, of per-example gradients ``[..., examples, D]``."""
    return grads.mT @ grads / grads.shape[-2]


def require_matrix_layers(model: nn.Module, params: Sequence[nn.Parameter], optimizer: str) -> list[MatrixLayer]:
    """The layers with trainable parameters; raises `UnsupportedLayerError` unless each of them has a matrix of its own."""
    partition = partition_layers(model, [{"params": list(params)}])
    others = [*partition.others, *(layer.name for layer in partition.layers if layer.shape[0] > 1)]
    if others:
        raise UnsupportedLayerError(
            f"{optimizer} supports only linear layers and convolutions without groups, and no shared weights, which "
            f"excludes {', '.join(name or type(model).__name__ for name in others)}. Freeze these layers with "
            "requires_grad_(False), or use NoisyKFAC or VOGN."
        )
    return partition.layers


def _zero_rows(layer: MatrixLayer, examples: int) -> LayerRows:
    _, rows, columns = layer.shape
    return LayerRows(layer.weight.new_zeros(examples, 1, columns), layer.weight.new_zeros(examples, 1, rows))


def _moments(before: LayerRows, after: LayerRows) -> tuple[Tensor, Tensor]:
    """(1/B) Σ δ δ'ᵀ and (1/B) Σ ā ā'ᵀ of two layers, or of a layer and itself."""
    count = len(before.inputs)
    output = before.gradients.flatten(0, 1).mT @ after.gradients.flatten(0, 1) / count
    return output, before.inputs.flatten(0, 1).mT @ after.inputs.flatten(0, 1) / count
