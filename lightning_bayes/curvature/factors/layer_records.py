"""What a pass keeps of its layers with factors: the moments of all examples together, or the rows of each example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from lightning_bayes.curvature.factors.factors import input_factor
from lightning_bayes.curvature.factors.rows import output_rows
from lightning_bayes.curvature.measurement import KroneckerFactors
from lightning_bayes.curvature.workspace import Workspace


class LayerRecords(ABC):
    """Collects the calls of layers with factors.

    Args:
        layers: The layers, and whether the bias is part of their matrix.
        workspace: Memory for what is needed for a moment.
    """

    def __init__(self, layers: Mapping[nn.Module, bool], workspace: Workspace) -> None:
        self.layers, self.workspace = layers, workspace

    @abstractmethod
    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor) -> None:
        """Add one call of a layer.

        Args:
            layer: The layer.
            x: Its input.
            grad_output: Gradient with respect to its output, in the scale of the loss that was differentiated.
        """

    @property
    @abstractmethod
    def called(self) -> Collection[nn.Module]:
        """The layers with a call."""


@dataclass
class _Moments:
    """Sums over the calls of one layer."""

    inputs: Tensor  # (1/B) Σ ā āᵀ
    outputs: Tensor  # Σ δ δᵀ, in the scale of the loss that was differentiated
    positions: int  # B · T


@final
class FactorMoments(LayerRecords):
    """Adds up the second moments of inputs and output gradients; arguments as in `LayerRecords`."""

    def __init__(self, layers: Mapping[nn.Module, bool], workspace: Workspace) -> None:
        super().__init__(layers, workspace)
        self._moments: dict[nn.Module, _Moments] = {}

    @property
    def called(self) -> Collection[nn.Module]:
        """The layers with a call."""
        return self._moments.keys()

    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor) -> None:
        """Add one call; see `LayerRecords.add`."""
        rows = output_rows(layer, grad_output)
        inputs = input_factor(layer, x, bias=self.layers[layer], workspace=self.workspace)
        new, old = _Moments(inputs, rows.mT @ rows, rows.shape[-2]), self._moments.get(layer)
        self._moments[layer] = (
            new
            if old is None
            else _Moments(old.inputs + new.inputs, old.outputs + new.outputs, old.positions + new.positions)
        )

    def mean_factors(self, scale: float) -> dict[nn.Module, KroneckerFactors]:
        """(S, A) of each layer.

        Args:
            scale: Factor of the mean of δ δᵀ over examples and positions.

        Returns:
            The factors.
        """
        return {
            layer: KroneckerFactors((moments.outputs * (scale / moments.positions), moments.inputs))
            for layer, moments in self._moments.items()
        }
