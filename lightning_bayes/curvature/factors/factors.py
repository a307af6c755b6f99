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
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.conv import conv
from lightning_bayes.curvature.rules.conv.windows import Conv, input_patches, padded
from lightning_bayes.curvature.rules.linear import linear
from lightning_bayes.curvature.rules.registry import rule_for
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace

MIN_BLOCKED_SIDE, BLOCKS = 256, 4


def has_factors(layer: nn.Module) -> bool:
    """Whether the layer has Kronecker factors: it computes the same function as ``nn.Linear`` or a convolution."""
    return rule_for(layer) in {linear, conv}


def input_factor(layer: nn.Module, x: Tensor, *, bias: bool = True, workspace: Workspace | None = None) -> Tensor:
    """A: the second moment of the layer's input, summed over positions and averaged over examples.

    Args:
        layer: A layer for which `has_factors` holds.
        x: Input of the layer, ``[B, …]``.
        bias: Whether the matrix includes the layer's bias, if it has one.
        workspace: Limits the number of examples unfolded at once; 64 MiB by default.

    Returns:
        ``[K, K]``, or ``[groups, K, K]`` for a grouped convolution. K = in / groups · |kernel|, plus one with a bias.

    Example:
        >>> input_factor(nn.Linear(1, 5), torch.tensor([[1.0], [3.0]]))
        tensor([[5., 2.],
                [2., 1.]])
    """
    bias, workspace = bias and layer.bias is not None, workspace or Workspace(DEFAULT_MIB)
    num_examples = workspace.examples_at_once(input_rows(layer, x[:1], bias).numel())
    first, *remaining = torch.split(x, num_examples)
    total = _moment(input_rows(layer, first, bias, workspace))
    for part in remaining:
        total += _moment(input_rows(layer, part, bias, workspace))
    return total.div_(max(1, len(x)))


def output_factor(layer: nn.Module, grad_output: Tensor) -> Tensor:
    """S: the second moment of the layer's output gradient, averaged over positions and examples.

    Args:
        layer: A layer for which `has_factors` holds.
        grad_output: Gradient of each example's own loss with respect to the layer's output, ``[B, …]``. For the backward
            pass of a mean loss, this is B times the incoming gradient.

    Returns:
        ``[out, out]``, or ``[groups, out / groups, out / groups]``.

    Example:
        >>> output_factor(nn.Linear(5, 1), torch.tensor([[1.0], [3.0]]))
        tensor([[5.]])
    """
    rows = output_rows(layer, grad_output)
    return _moment(rows) / max(1, rows.shape[-2])


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
