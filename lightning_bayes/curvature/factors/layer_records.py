"""A pass's records of layers with factors: the moments of all examples together, or the rows of each example."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from lightning_bayes.curvature.factors.factors import input_factor
from lightning_bayes.curvature.factors.rows import output_rows
from lightning_bayes.curvature.likelihood import Likelihood
from lightning_bayes.curvature.loss_calls import LossCalls
from lightning_bayes.curvature.measurement import KroneckerFactors
from lightning_bayes.curvature.workspace import Workspace


@dataclass(frozen=True)
class Request:
    """The curvature that a pass measures beside the gradient.

    Attributes:
        layers: The layers whose factors are measured, and whether the bias is part of their matrix.
        likelihood: Draws the labels, from the model's outputs, or as the loss says; None takes those of the data.
        seed: Seed of the draws.
        loss_scale: Factor on the loss for the backward in mixed precision.
        mc_samples: Labels drawn per example; more than one where every parameter is in a layer with factors.
    """

    layers: Mapping[nn.Module, bool]
    likelihood: Likelihood | LossCalls | None = None
    seed: int = 0
    loss_scale: float = 1.0
    mc_samples: int = 1


class LayerRecords(ABC):
    """Collects the calls of layers with factors in one pass.

    Args:
        request: The layers and labels to measure.
        workspace: Memory for what is needed for a moment.
    """

    def __init__(self, request: Request, workspace: Workspace) -> None:
        self.request, self.workspace = request, workspace

    @abstractmethod
    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Add one call of a layer.

        Args:
            layer: The layer.
            x: Its input.
            grad_output: Gradient with respect to its output, in the scale of the loss that was differentiated.
            is_first: Whether no other draw of labels has added this call.
        """

    @property
    @abstractmethod
    def called(self) -> Collection[nn.Module]:
        """The layers with a call."""

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context around the passes, entered before the engine wraps any forward."""
        return nullcontext()

    def observe(self, loss: Tensor, divided_by_host: bool) -> None:
        """See the loss before its backward; arguments as in `Capture.observe`."""
        return

    def aside(self) -> AbstractContextManager[None]:
        """A context around a loss of drawn labels and its backward."""
        return nullcontext()


class FactorRecords(LayerRecords, ABC):
    """Records that end in factors; arguments as in `LayerRecords`."""

    @abstractmethod
    def mean_factors(self, output_scale: float, loss_scale: float) -> dict[nn.Module, KroneckerFactors]:
        """(S, Ā) of each layer, see `curvature.factors.conversion`.

        Args:
            output_scale: Factor of the mean of δ δᵀ over the examples of the batch and their positions, with δ in the scale
                of the loss that was differentiated.
            loss_scale: Factor of what is in the scale of the closure's loss.

        Returns:
            The factors.
        """


@dataclass
class _Moments:
    """Sums over the calls of one layer."""

    inputs: Tensor  # (1/B) Σ ā āᵀ
    outputs: Tensor  # Σ δ δᵀ, in the scale of the loss that was differentiated
    positions: int  # B · T, times the draws of labels


@final
class FactorMoments(FactorRecords):
    """Adds up the second moments of inputs and output gradients; arguments as in `LayerRecords`."""

    def __init__(self, request: Request, workspace: Workspace) -> None:
        super().__init__(request, workspace)
        self._moments: dict[nn.Module, _Moments] = {}

    @property
    def called(self) -> Collection[nn.Module]:
        """The layers with a call."""
        return self._moments.keys()

    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Add one call; see `LayerRecords.add`."""
        rows, old = output_rows(layer, grad_output), self._moments.get(layer)
        outputs, positions = rows.mT @ rows, rows.shape[-2]
        if old is None:
            inputs = input_factor(layer, x, bias=self.request.layers[layer], workspace=self.workspace)
            self._moments[layer] = _Moments(inputs, outputs, positions)
            return
        if is_first:
            old.inputs = old.inputs + input_factor(layer, x, bias=self.request.layers[layer], workspace=self.workspace)
        old.outputs, old.positions = old.outputs + outputs, old.positions + positions

    def mean_factors(self, output_scale: float, loss_scale: float) -> dict[nn.Module, KroneckerFactors]:
        """(S, Ā) of each layer; see `FactorRecords.mean_factors`."""
        return {
            layer: KroneckerFactors((moments.outputs * (output_scale / moments.positions), moments.inputs))
            for layer, moments in self._moments.items()
        }
