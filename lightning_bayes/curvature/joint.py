"""Every example's gradient in every layer of a small model, for curvature that does not stop at the layers' borders."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.factors import LayerRecords, Request, input_rows, output_rows
from lightning_bayes.curvature.kronecker import KroneckerCapture
from lightning_bayes.curvature.workspace import Workspace


class LayerRows(NamedTuple):
    """Inputs and output gradients of a layer with factors, at T positions of B examples; a second call adds positions.

    Attributes:
        inputs: ā, with a last 1 for the bias, ``[B, T, K]``.
        gradients: δ of each example's own loss, ``[B, T, out]``.
    """

    inputs: Tensor
    gradients: Tensor

    def example_gradients(self) -> Tensor:
        """Gradient of each example's own loss with respect to the layer's matrix, ``[B, out, K]``."""
        return self.gradients.mT @ self.inputs


@final
class ExampleRows(LayerRecords):
    """Keeps the rows of every example; arguments as in `LayerRecords`, with layers that have no groups.

    They take the memory of all inputs and output gradients of a batch, in all layers.
    """

    def __init__(self, request: Request, workspace: Workspace) -> None:
        super().__init__(request, workspace)
        self.rows: dict[nn.Module, LayerRows] = {}

    @property
    def called(self) -> Collection[nn.Module]:
        """The layers with a call."""
        return self.rows.keys()

    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Keep one call; see `LayerRecords.add`."""
        seen = input_rows(layer, x, self.request.layers[layer]), output_rows(layer, grad_output)
        new = LayerRows(*(torch.unflatten(rows, 0, (len(x), -1)) for rows in seen))
        old = self.rows.get(layer)
        self.rows[layer] = (
            new if old is None else LayerRows(*(torch.cat(both, 1) for both in zip(old, new, strict=True)))
        )


def example_rows(captured: KroneckerCapture) -> dict[nn.Module, LayerRows]:
    """The rows of every layer that backward reached, in the scale of each example's own loss.

    Args:
        captured: A finished capture of an engine with `ExampleRows`.

    Returns:
        The rows.
    """
    assert isinstance(captured.records, ExampleRows)
    scale = captured.own_scale / captured.request.loss_scale
    return {layer: LayerRows(found.inputs, found.gradients * scale) for layer, found in captured.records.rows.items()}
