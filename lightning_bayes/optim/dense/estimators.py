"""Curvature estimators over all weights: Hessian, outer products of per-example gradients, Kronecker factors of a chain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import AbstractEngine, Capture, Likelihood, LossReduction
from lightning_bayes.curvature.factors import ExampleRows, LayerRows, Request
from lightning_bayes.curvature.hessian import HessianCapture, HessianEngine
from lightning_bayes.curvature.kronecker import KroneckerCapture, KroneckerEngine
from lightning_bayes.errors import ShapeError, UnsupportedLayerError
from lightning_bayes.optim.fisher import FisherName, check_fisher, label_source
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer, partition_layers


class JointEstimator(ABC):
    """Measures the joint curvature of all weights.

    Attributes:
        engine: Engine that captures the passes.
    """

    engine: AbstractEngine

    def capture(self, label_seed: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """Open the capture of a pass.

        Args:
            label_seed: Seed for sampling labels, if the estimator does so.
            loss_scale: Factor by which the loss is multiplied.

        Returns:
            The engine's capture.
        """
        return self.engine.capture()

    @abstractmethod
    def read(self, captured: Any, loss_scale: float) -> list[Tensor]:
        """Read the curvature of a finished pass, averaged over its examples; arguments as in `capture`."""


@final
class HessianEstimator(JointEstimator):
    """The exact Hessian, ``[D, D]``, of a model with respect to its trainable parameters."""

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter], loss_reduction: LossReduction) -> None:
        self.engine = HessianEngine(model, params, loss_reduction)

    def read(self, captured: Any, loss_scale: float) -> list[Tensor]:
        """Read the Hessian; see `JointEstimator.read`."""
        assert isinstance(captured, HessianCapture)
        return [captured.mean_hessian() / loss_scale]


class RowsEstimator(JointEstimator, ABC):
    """Curvature from the inputs and output gradients of all examples in each layer.

    Args:
        model: A model of linear layers and convolutions without groups.
        params: Its trainable parameters.
        optimizer: Name of the optimizer in error messages.
        fisher: See `optim.fisher.label_source`.
        likelihood: See `optim.fisher.label_source`.
        loss_reduction: How the loss is reduced over examples, see `curvature.measure`.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        optimizer: str,
        *,
        fisher: FisherName | None,
        likelihood: Likelihood | None,
        loss_reduction: LossReduction,
    ) -> None:
        check_fisher(fisher)
        self._params, self._labels = list(params), partial(label_source, fisher, likelihood, model)
        self._labels()  # raises if it cannot be sampled
        self.layers = require_matrix_layers(model, params, optimizer)
        self._engine = self.engine = KroneckerEngine(model, loss_reduction, records=ExampleRows)

    def capture(self, label_seed: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """Open a capture of the per-example rows of all layers; see `JointEstimator.capture`."""
        layers = {layer.module: layer.has_bias for layer in self.layers}
        return self._engine.capture(Request(layers, self._labels(), label_seed, loss_scale))

    def _rows(self, captured: Any) -> list[LayerRows]:
        """The rows of each layer; zeros for layers that the backward pass did not reach."""
        assert isinstance(captured, KroneckerCapture)
        rows: dict[nn.Module, LayerRows] = captured.results()
        examples = len(next(iter(rows.values())).inputs)
        return [rows.get(layer.module) or _zero_rows(layer, examples) for layer in self.layers]


@final
class OuterProductEstimator(RowsEstimator):
    """The mean of g_i g_iᵀ, ``[D, D]``; arguments as in `RowsEstimator`."""

    def read(self, captured: Any, loss_scale: float) -> list[Tensor]:
        """Read the mean outer product; see `JointEstimator.read`."""
        grads: dict[nn.Parameter, Tensor] = {}
        for layer, rows in zip(self.layers, self._rows(captured), strict=True):
            grads |= _example_gradients(layer, rows)
        return [outer_products(torch.cat([grads[param] for param in self._params], 1))]


@final
class ChainFactorsEstimator(RowsEstimator):
    """S and A of each layer, then of each pair of neighbours; arguments as in `RowsEstimator`."""

    def read(self, captured: Any, loss_scale: float) -> list[Tensor]:
        """Read the factors; see `JointEstimator.read`. Raises `ShapeError` for layers with several positions per example."""
        rows = self._rows(captured)
        several = [layer.name for layer, row in zip(self.layers, rows, strict=True) if row.inputs.shape[1] > 1]
        if several:
            raise ShapeError(
                f"The curvature between two layers requires one position per example, but {', '.join(several)} had several, "
                "or was called several times. Use NoisyKFAC for such layers."
            )
        pairs = [*zip(rows, rows, strict=True), *pairwise(rows)]
        return [factor for pair in pairs for factor in _factors(*pair)]


def outer_products(grads: Tensor) -> Tensor:
    """Return the mean of g_i g_iᵀ, ``[..., D, D]``, of per-example gradients ``[..., examples, D]``."""
    return grads.mT @ grads / grads.shape[-2]


def require_matrix_layers(model: nn.Module, params: Sequence[nn.Parameter], optimizer: str) -> list[MatrixLayer]:
    """Find the layers with trainable parameters: linear layers and convolutions without groups, in the model's order.

    Args:
        model: The model.
        params: Its trainable parameters.
        optimizer: Name of the optimizer in the error message.

    Returns:
        The layers.

    Raises:
        UnsupportedLayerError: If other layers have trainable parameters, or layers share them.
    """
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


def _example_gradients(layer: MatrixLayer, rows: LayerRows) -> dict[nn.Parameter, Tensor]:
    """Per-example gradients of a layer's parameters, ``[B, numel]``."""
    grads = rows.example_gradients()
    if not layer.has_bias:
        return {layer.weight: grads.flatten(1)}
    return {layer.weight: grads[..., :-1].flatten(1), layer.params[1]: grads[..., -1]}


def _factors(before: LayerRows, after: LayerRows) -> tuple[Tensor, Tensor]:
    """(1/B) Σ δ δ'ᵀ and (1/B) Σ ā ā'ᵀ of two layers, or of a layer and itself."""
    count = len(before.inputs)
    output = before.gradients.flatten(0, 1).mT @ after.gradients.flatten(0, 1) / count
    input_ = before.inputs.flatten(0, 1).mT @ after.inputs.flatten(0, 1) / count
    return output, input_
