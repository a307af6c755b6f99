"""The two Kronecker factors of a layer's curvature: Martens & Grosse 2015, and Grosse & Martens 2016 for convolutions.

    A = (1/B) Σ_i Σ_t ā_it ā_itᵀ        S = (1/(B T)) Σ_i Σ_t δ_it δ_itᵀ

    S ⊗ A ≈ (1/B) Σ_i vec(g_i) vec(g_i)ᵀ        g_i = Σ_t δ_it ā_itᵀ        vec: row by row

https://arxiv.org/abs/1503.05671, https://arxiv.org/abs/1602.01407. The factors follow the scale convention of the package: a
mean over examples, for the mean loss without prior. δ_it is the gradient of example i's **own** loss; the backward pass of a
mean over B examples yields 1/B of it. With labels drawn from the model (`Likelihood.sampled_loss`) the product approximates
the Fisher, with data labels the empirical Fisher. It is exact for one example with one position, and if inputs and gradients
are independent, as in a deep linear network. Each group of a convolution has its own pair of factors.

A layer applies one matrix W (bias as last column) at T positions of each example: s_it = W ā_it, where ā_it ends in a 1 if
there is a bias. In a linear layer, the positions are the dimensions between examples and features. In a convolution, they
are the output positions, and ā_it is an input patch.

**Joint and separate factors.** The A above is the joint one, Ā = [[A, m], [mᵀ, T]]. `measure` returns separate factors,
which omit the block m between weight and bias:

    weight: S ⊗ A        bias: T S

BackPACK's KFAC, KFLR and KFRA also separate weight and bias. Both use

    S' = (1/n) Σ_i (Σ_t δ_it)(Σ_t δ_it)ᵀ        A' = A

which sums over positions **before** the product. S' is the exact block of the bias. For the weight, S' ⊗ A would count the T
positions twice, so the conversion uses S = S'/T. This block is right for identical positions (T² times one of them) and for
uncorrelated gradients (T times one of them); the S above is right only for uncorrelated gradients. With T = 1, as in every
linear layer without positions, S = S'. Ā is always this package's, because BackPACK omits m.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.measurement import KroneckerFactors
from lightning_bayes.curvature.rules.conv import conv
from lightning_bayes.curvature.rules.conv.windows import Conv, input_patches, padded
from lightning_bayes.curvature.rules.linear import linear
from lightning_bayes.curvature.rules.registry import rule_for
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace
from lightning_bayes.likelihood import OutputLikelihood

MIN_BLOCKED_SIDE, BLOCKS = 256, 4


def has_factors(layer: nn.Module) -> bool:
    """Whether the layer has Kronecker factors: it computes the same function as ``nn.Linear`` or a convolution."""
    return rule_for(layer) in {linear, conv}


def input_factor(layer: nn.Module, x: Tensor, *, bias: bool = True, workspace: Workspace | None = None) -> Tensor:
    """A: the second moment of the input ``[B, …]``, ``[K, K]``, or ``[groups, K, K]``; K counts a bias."""
    bias, workspace = bias and layer.bias is not None, workspace or Workspace(DEFAULT_MIB)
    num_examples = workspace.examples_at_once(input_rows(layer, x[:1], bias).numel())
    first, *remaining = torch.split(x, num_examples)
    total = _moment(input_rows(layer, first, bias, workspace))
    for part in remaining:
        total += _moment(input_rows(layer, part, bias, workspace))
    return total.div_(max(1, len(x)))


def _moment(rows: Tensor) -> Tensor:
    """The sum of the rows' outer products. Of a large result, only blocks on and above the diagonal are computed."""
    size = rows.shape[-1]
    if size < MIN_BLOCKED_SIDE:
        return rows.mT @ rows
    moment = rows.new_empty(*rows.shape[:-2], size, size)
    step = -(-size // BLOCKS)
    for first in range(0, size, step):
        block = rows[..., first : first + step].mT @ rows[..., first:]
        moment[..., first : first + step, first:] = block
        moment[..., first:, first : first + step] = block.mT
    return moment


def input_rows(layer: nn.Module, x: Tensor, bias: bool, workspace: Workspace | None = None) -> Tensor:
    """The vectors ā_it, ``[B · T, K]``, or ``[groups, B · T, K]`` for a grouped convolution."""
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        rows = _conv_columns(layer, x, bias, workspace).mT
        return rows[0] if layer.groups == 1 else rows
    rows = x.flatten(0, -2)
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1) if bias else rows


def output_rows(layer: nn.Module, grad_output: Tensor) -> Tensor:
    """The vectors δ_it: ``[B · T, out]``, or ``[groups, B · T, out / groups]`` for a grouped convolution."""
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        grouped = torch.unflatten(grad_output.flatten(2), 1, (layer.groups, -1))  # [B, groups, out / groups, T]
        rows = grouped.permute(1, 0, 3, 2).flatten(1, 2)
        return rows[0] if layer.groups == 1 else rows
    return grad_output.flatten(0, -2)


def _conv_columns(layer: Conv, x: Tensor, bias: bool, workspace: Workspace | None) -> Tensor:
    """ā_it as columns, ``[groups, K, B · T]``, copied along the positions, which are contiguous in the input."""
    x = padded(layer, x)
    positions = torch.Size(
        (size - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, dilation in zip(
            x.shape[2:], layer.kernel_size, layer.stride, layer.dilation, strict=True
        )
    )
    patches = torch.unflatten(input_patches(layer, x, positions), 1, (layer.groups, -1))
    patches = patches.movedim(0, -1 - len(positions))  # [groups, C, *kernel, B, *out]
    size = layer.weight[0].numel()
    shape = layer.groups, size + bias, len(x) * positions.numel()
    columns = x.new_empty(shape) if workspace is None else workspace.empty("factor columns", shape, x)
    columns[:, :size].view(patches.shape).copy_(patches)
    columns[:, size:] = 1
    return columns


def split_bias(factors: KroneckerFactors) -> tuple[KroneckerFactors, KroneckerFactors]:
    """Separate the joint factors (S, Ā) of a layer into (S, A) of the weight and (T S,) of the bias."""
    outputs, inputs = factors.factors
    weight = inputs[..., :-1, :-1].contiguous()
    return KroneckerFactors((outputs, weight)), KroneckerFactors((outputs * inputs[..., -1:, -1:],))


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
        loops: Whether parameters without factors that no rule covers are measured by a loop over the examples.
    """

    layers: Mapping[nn.Module, bool]
    likelihood: OutputLikelihood | Literal["of_loss"] | None = None
    seed: int = 0
    loss_scale: float = 1.0
    mc_samples: int = 1
    loops: bool = False


class LayerRecords(ABC):
    """Collects the calls of layers with factors in one pass."""

    def __init__(self, request: Request, workspace: Workspace) -> None:
        self.request, self.workspace = request, workspace
        self._by_layer: dict[nn.Module, Any] = {}

    @abstractmethod
    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        """Add a call with its input and output gradient; `is_first` is False for further draws of labels."""

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
    """Accumulates the second moments of inputs and output gradients."""

    @override
    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
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
        """(S, Ā) of each layer, as means over examples; see above."""
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


def layer_rows(layer: nn.Module, x: Tensor, grad_output: Tensor, bias: bool) -> LayerRows:
    """The rows of one call of a layer without groups, with the gradient as it is."""
    rows = input_rows(layer, x, bias), output_rows(layer, grad_output)
    return LayerRows(*(torch.unflatten(row, 0, (len(x), -1)) for row in rows))


@final
class ExampleRows(LayerRecords):
    """Stores the inputs and output gradients of all examples in all layers. Layers must not have groups."""

    @override
    def add(self, layer: nn.Module, x: Tensor, grad_output: Tensor, is_first: bool = True) -> None:
        inputs, gradients = layer_rows(layer, x, grad_output, self.request.layers[layer])
        earlier: LayerRows | None = self._by_layer.get(layer)
        if earlier is not None:
            inputs, gradients = torch.cat([earlier.inputs, inputs], 1), torch.cat([earlier.gradients, gradients], 1)
        self._by_layer[layer] = LayerRows(inputs, gradients)

    def results(self, scales: Scales) -> dict[nn.Module, LayerRows]:
        """The rows of each layer, with gradients on the scale of each example's own loss."""
        scale = scales.own
        return {layer: LayerRows(rows.inputs, rows.gradients * scale) for layer, rows in self._by_layer.items()}
