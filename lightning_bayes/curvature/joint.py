"""Per-example gradients of every layer of a small model, for curvature that couples the layers."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.factors import LayerRecords, Request, input_rows, output_rows
from lightning_bayes.curvature.kronecker import KroneckerCapture
from lightning_bayes.curvature.workspace import Workspace


class LayerRows(NamedTuple):
    """Inputs and output gradients of a layer with factors, at T positions of B examples. A second call adds positions."""

    inputs: Tensor  # ā, with an appended 1 for the bias, [B, T, K]
    gradients: Tensor  # δ of each example's own loss, [B, T, out]

    def example_gradients(self) -> Tensor:
        """Gradient of each example's own loss with respect to the layer's matrix, ``[B, out, K]``."""
        return self.gradients.mT @ self.inputs


@final
class ExampleRows(LayerRecords):
    """Stores the inputs and output gradients of all examples in all layers. Layers must not have groups.

    Arguments as in `LayerRecords`.
    """

    def __init__(self, request: Request, workspace: Workspace) -> None:
        super().__init__(request, workspace)
        self.rows: dict[nn.Module, LayerRows] = {}

    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Store one call; see `LayerRecords.add`."""
        inputs = torch.unflatten(input_rows(layer, x, self.request.layers[layer]), 0, (len(x), -1))
        gradients = torch.unflatten(output_rows(layer, grad_output), 0, (len(x), -1))
        if layer in self.rows:
            earlier = self.rows[layer]
            inputs, gradients = torch.cat([earlier.inputs, inputs], 1), torch.cat([earlier.gradients, gradients], 1)
        self.rows[layer] = LayerRows(inputs, gradients)


def example_rows(captured: KroneckerCapture) -> dict[nn.Module, LayerRows]:
    """The `ExampleRows` of a finished capture by layer, with gradients on the scale of each example's own loss."""
    assert isinstance(captured.records, ExampleRows)
    rows_of, scale = captured.records.rows, captured.own_scale
    return {layer: LayerRows(rows.inputs, rows.gradients * scale) for layer, rows in rows_of.items()}
