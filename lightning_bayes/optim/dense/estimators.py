"""Measurements over all weights: the Hessian, outer products of examples' gradients, or the factors of a chain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import AbstractEngine, Capture, Likelihood, LossReduction
from lightning_bayes.curvature.factors import Request
from lightning_bayes.curvature.hessian import HessianCapture, HessianEngine
from lightning_bayes.curvature.joint import ExampleRows, LayerRows, example_rows
from lightning_bayes.curvature.kronecker import KroneckerCapture, KroneckerEngine
from lightning_bayes.errors import ShapeError, UnsupportedLayerError
from lightning_bayes.optim.dense.full_gaussian import outer_products
from lightning_bayes.optim.fisher import FisherName, check_fisher, label_source
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer, divide


class JointEstimator(ABC):
    """Measures the curvature of all weights together.

    Attributes:
        engine: Measures the passes.
    """

    engine: AbstractEngine

    def capture(self, label_seed: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """Open the capture of a pass.

        Args:
            label_seed: Seed of the labels, where they are drawn.
            loss_scale: Factor that multiplied the loss.

        Returns:
            The engine's capture.
        """
        return self.engine.capture()

    @abstractmethod
    def read(self, captured: Any, loss_scale: float) -> list[Tensor]:
        """Read the curvature of a finished pass.

        Args:
            captured: The capture.
            loss_scale: Factor that multiplied the loss.

        Returns:
            Means over the pass's examples.
        """


@final
class HessianEstimator(JointEstimator):
    """The exact Hessian, ``[D, D]``.

    Args:
        model: The model.
        params: Its trainable parameters.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
    """

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter], loss_reduction: LossReduction) -> None:
        self.engine = HessianEngine(model, params, loss_reduction)

    def read(self, captured: Any, loss_scale: float) -> list[Tensor]:
        """Read the Hessian; see `JointEstimator.read`."""
        assert isinstance(captured, HessianCapture)
        return [captured.mean_hessian() / loss_scale]


class RowsEstimator(JointEstimator, ABC):
    """Curvature from the inputs and output gradients of every example in every layer.

    Args:
        model: A model of linear layers and convolutions without groups.
        params: Its trainable parameters.
        optimizer: Name of the optimizer in error messages.
        fisher: ``"sampled"`` draws labels from the likelihood, ``"empirical"`` takes the data's; None draws them where a
            likelihood is known.
        likelihood: The likelihood of the model's outputs; None looks for the model's attribute ``likelihood``.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
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
        label_source(fisher, likelihood, model)  # refuses a likelihood that cannot be sampled
        self._model, self._params, self._fisher, self._likelihood = model, list(params), fisher, likelihood
        self.layers = require_matrix_layers(model, params, optimizer)
        self._engine = self.engine = KroneckerEngine(model, loss_reduction, records=ExampleRows)

    def capture(self, label_seed: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """Open a capture that keeps the rows of all layers; see `JointEstimator.capture`."""
        labels = label_source(self._fisher, self._likelihood, self._model)
        layers = {layer.module: layer.has_bias for layer in self.layers}
        return self._engine.capture(Request(layers, labels, label_seed, loss_scale))

    def _rows(self, captured: Any) -> list[LayerRows]:
        """The rows of each layer; zeros where backward did not reach it."""
        assert isinstance(captured, KroneckerCapture)
        found = example_rows(captured)
        examples = len(next(iter(found.values())).inputs)
        return [found.get(layer.module) or _no_rows(layer, examples) for layer in self.layers]


@final
class OuterProductEstimator(RowsEstimator):
    """The mean of g_i g_iᵀ, ``[D, D]``; arguments as in `RowsEstimator`."""

    def read(self, captured: Any, loss_scale: float) -> list[Tensor]:
        """Read the mean outer product; see `JointEstimator.read`."""
        of_param: dict[nn.Parameter, Tensor] = {}
        for layer, rows in zip(self.layers, self._rows(captured), strict=True):
            of_param |= _example_gradients(layer, rows)
        return [outer_products(torch.cat([of_param[param] for param in self._params], 1))]


@final
class ChainFactorsEstimator(RowsEstimator):
    """S and A of every layer, then of every pair of neighbours; arguments as in `RowsEstimator`."""

    def read(self, captured: Any, loss_scale: float) -> list[Tensor]:
        """Read the factors; see `JointEstimator.read`. Layers with several positions are a `ShapeError`."""
        rows = self._rows(captured)
        crowded = [layer.name for layer, seen in zip(self.layers, rows, strict=True) if seen.inputs.shape[1] > 1]
        if crowded:
            raise ShapeError(
                f"The curvature between two layers needs one position for each example, but {', '.join(crowded)} saw "
                "several, or was called several times. Use NoisyKFAC for such layers."
            )
        pairs = [*zip(rows, rows, strict=True), *pairwise(rows)]
        return [factor for pair in pairs for factor in _factors(*pair)]


def require_matrix_layers(model: nn.Module, params: Sequence[nn.Parameter], optimizer: str) -> list[MatrixLayer]:
    """Require every trainable parameter to lie in a linear layer or a convolution without groups.

    Args:
        model: The model.
        params: Its trainable parameters.
        optimizer: Name of the optimizer in the error message.

    Returns:
        The layers in the order of the model.

    Raises:
        UnsupportedLayerError: Listing the layers that do not fit.
    """
    found = divide(model, [{"params": list(params)}], lambda weight, bias: True, max_side=2**31)
    others = [*found.others, *(layer.name for layer in found.layers if layer.shape[0] > 1)]
    if others:
        raise UnsupportedLayerError(
            f"{optimizer} joins the weights of linear layers and of convolutions without groups, each with weights of its "
            f"own, but these are others: {', '.join(name or type(model).__name__ for name in others)}. Freeze them with "
            "requires_grad_(False), or use NoisyKFAC or VOGN."
        )
    return found.layers


def _no_rows(layer: MatrixLayer, examples: int) -> LayerRows:
    _, rows, columns = layer.shape
    return LayerRows(layer.weight.new_zeros(examples, 1, columns), layer.weight.new_zeros(examples, 1, rows))


def _example_gradients(layer: MatrixLayer, rows: LayerRows) -> dict[nn.Parameter, Tensor]:
    """The gradient of each example with respect to a layer's parameters, ``[B, numel]``."""
    grads = rows.example_gradients()
    if not layer.has_bias:
        return {layer.weight: grads.flatten(1)}
    return {layer.weight: grads[..., :-1].flatten(1), layer.params[1]: grads[..., -1]}


def _factors(before: LayerRows, after: LayerRows) -> tuple[Tensor, Tensor]:
    """(1/B) Σ δ δ'ᵀ and (1/B) Σ ā ā'ᵀ of two layers, or of a layer and itself; see `curvature.factors.link_factors`."""
    count = len(before.inputs)
    inputs, gradients = (
        [rows.flatten(0, 1) for rows in pair]
        for pair in zip(*((r.inputs, r.gradients) for r in (before, after)), strict=True)
    )
    return gradients[0].mT @ gradients[1] / count, inputs[0].mT @ inputs[1] / count
