"""Every example's gradient in every layer of a small model, for curvature that does not stop at the layers' borders."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.factors import input_rows, output_rows
from lightning_bayes.curvature.kronecker import KroneckerCapture, KroneckerEngine, Request


class LayerRows(NamedTuple):
    """What a layer with factors sees and gets back, at T positions of B examples; a second call adds positions.

    Attributes:
        inputs: ā, with a last 1 for the bias, ``[B, T, K]``.
        gradients: δ of each example's own loss, ``[B, T, out]``.
    """

    inputs: Tensor
    gradients: Tensor

    def example_gradients(self) -> Tensor:
        """Gradient of each example's own loss with respect to the layer's matrix, ``[B, out, K]``."""
        return self.gradients.mT @ self.inputs


class RowsEngine(KroneckerEngine):
    """Keeps the rows of the layers that a request names; arguments as in `AbstractEngine`.

    They take the memory of all inputs and output gradients of a batch, in all layers.
    """

    def new_capture(self, request: Request) -> RowsCapture:
        """An empty capture for `request`."""
        return RowsCapture(self, request)


class RowsCapture(KroneckerCapture):
    """A `KroneckerCapture` that keeps rows in the place of their moments.

    Args:
        engine: The engine.
        request: What is asked for; layers without groups.
    """

    def __init__(self, engine: RowsEngine, request: Request) -> None:
        super().__init__(engine, request)
        self._rows: dict[nn.Module, LayerRows] = {}

    @property
    def reached(self) -> set[nn.Parameter]:
        """The measured parameters."""
        return super().reached | {param for layer in self._rows for param in layer.parameters()}

    def add_call(self, layer: nn.Module, x: Tensor, grad_output: Tensor) -> None:
        """Keep one call of a layer.

        Args:
            layer: The layer.
            x: Its input.
            grad_output: Gradient with respect to its output.
        """
        seen = input_rows(layer, x, self.request.layers[layer]), output_rows(layer, grad_output)
        new = LayerRows(*(torch.unflatten(rows, 0, (len(x), -1)) for rows in seen))
        old = self._rows.get(layer)
        self._rows[layer] = (
            new if old is None else LayerRows(*(torch.cat(both, 1) for both in zip(old, new, strict=True)))
        )

    def rows(self) -> dict[nn.Module, LayerRows]:
        """The rows of every layer that backward reached, in the scale of each example's own loss."""
        own = float(self.num_examples) if self.scale.reduction == "mean" else 1.0
        if self.request.likelihood is not None:  # the drawn loss is a mean over the batch
            own = float(next(len(found.inputs) for found in self._rows.values()))
        own /= self.request.loss_scale
        return {layer: LayerRows(found.inputs, found.gradients * own) for layer, found in self._rows.items()}
