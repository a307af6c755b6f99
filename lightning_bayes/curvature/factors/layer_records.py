"""Records of the calls of layers with factors: moments over all examples, or rows of each example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.factors.factors import input_factor, input_rows, output_rows
from lightning_bayes.curvature.likelihood import Likelihood
from lightning_bayes.curvature.measurement import KroneckerFactors
from lightning_bayes.curvature.workspace import Workspace


class Scales(NamedTuple):
    """Factors from the values of the measuring backward to means over examples."""

    own: float  # of δ, to the gradient of the example's own loss
    factor: float  # of the mean of δ δᵀ over examples and positions, to S
    gradient: float  # of the gradient of the observed loss, to the mean gradient


@dataclass(frozen=True)
class Request:
    """The curvature that a pass measures in addition to the gradient.

    Attributes:
        layers: The measured layers, and whether the matrix of each includes the bias.
        likelihood: Likelihood from which labels are sampled; ``"of_loss"`` is that of the recorded loss function. None uses
            the labels of the data, except that BackPACK's KFAC samples its labels itself.
        seed: Random seed of the labels.
        loss_scale: Loss scale of mixed precision.
        mc_samples: Number of labels drawn per example. Must be 1 unless every parameter is in a layer with factors.
    """

    layers: Mapping[nn.Module, bool]
    likelihood: Likelihood | Literal["of_loss"] | None = None
    seed: int = 0
    loss_scale: float = 1.0
    mc_samples: int = 1


class LayerRecords(ABC):
    """Collects the calls of layers with factors in one pass.

    Args:
        request: The layers and labels to measure.
        workspace: Memory for temporary tensors.
    """

    def __init__(self, request: Request, workspace: Workspace) -> None:
        self.request, self.workspace = request, workspace
        self._by_layer: dict[nn.Module, Any] = {}

    @abstractmethod
    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Add a call.

        Args:
            layer: The layer.
            x: Its input.
            grad_output: Gradient with respect to its output, on the scale of the differentiated loss.
            is_first: Whether this is the call's first label draw, so that its input was not added yet.
        """

    @abstractmethod
    def results(self, scales: Scales) -> dict[nn.Module, Any]:
        """The result of each layer that backward reached."""

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context around all passes, entered before the engine wraps any forward."""
        return nullcontext()

    def observe(self, loss: Tensor, divided_by_host: bool) -> None:
        """Inspect the loss before its backward pass; arguments as in `Capture.observe`."""
        return

    def sampling(self) -> AbstractContextManager[None]:
        """A context around the loss of sampled labels and its backward pass."""
        return nullcontext()


@dataclass
class _Moments:
    """Sums over the calls of one layer."""

    inputs: Tensor  # (1/B) Σ ā āᵀ
    outputs: Tensor  # Σ δ δᵀ, on the scale of the differentiated loss
    positions: int  # B · T · label draws


@final
class FactorMoments(LayerRecords):
    """Accumulates the second moments of inputs and output gradients; arguments as in `LayerRecords`."""

    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Add one call; see `LayerRecords.add`."""
        rows = output_rows(layer, grad_output)
        moments: _Moments | None = self._by_layer.get(layer)
        outputs, positions = rows.mT @ rows, rows.shape[-2]
        if moments is None:
            self._by_layer[layer] = _Moments(self._inputs(layer, x), outputs, positions)
            return
        if is_first:
            moments.inputs = moments.inputs + self._inputs(layer, x)
        moments.outputs = moments.outputs + outputs
        moments.positions += positions

    def _inputs(self, layer: nn.Module, x: Tensor) -> Tensor:
        return input_factor(layer, x, bias=self.request.layers[layer], workspace=self.workspace)

    def results(self, scales: Scales) -> dict[nn.Module, KroneckerFactors]:
        """(S, Ā) of each layer, as means over examples; see `curvature.factors.conversion`."""
        scale = scales.factor
        return {
            layer: KroneckerFactors((moments.outputs * (scale / moments.positions), moments.inputs))
            for layer, moments in self._by_layer.items()
        }


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

    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Store one call; see `LayerRecords.add`."""
        inputs = torch.unflatten(input_rows(layer, x, self.request.layers[layer]), 0, (len(x), -1))
        gradients = torch.unflatten(output_rows(layer, grad_output), 0, (len(x), -1))
        earlier: LayerRows | None = self._by_layer.get(layer)
        if earlier is not None:
            inputs, gradients = torch.cat([earlier.inputs, inputs], 1), torch.cat([earlier.gradients, gradients], 1)
        self._by_layer[layer] = LayerRows(inputs, gradients)

    def results(self, scales: Scales) -> dict[nn.Module, LayerRows]:
        """The rows of each layer, with gradients on the scale of each example's own loss."""
        scale = scales.own
        return {layer: LayerRows(rows.inputs, rows.gradients * scale) for layer, rows in self._by_layer.items()}
