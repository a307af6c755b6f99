"""The inputs and output gradients of a layer's weight matrix at every position of every example.

A layer with weight sharing applies one matrix W (bias as last column) at T positions: s_it = W ā_it, where ā_it ends in a
1 if there is a bias. The gradient of example i is Σ_t δ_it ā_itᵀ. In a linear layer, the positions are the dimensions
between examples and features. In a convolution, they are the output positions, and ā_it is an input patch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.conv.windows import Conv, input_patches, padded
from lightning_bayes.curvature.workspace import Workspace


def input_rows(layer: nn.Module, x: Tensor, bias: bool, workspace: Workspace | None = None) -> Tensor:
    """The vectors ā_it.

    Args:
        layer: ``nn.Linear`` or ``nn.Conv1d/2d/3d``.
        x: Input of the layer, ``[B, …]``.
        bias: Whether ā ends in a 1.
        workspace: Holds the patches of a convolution until the next call. By default, new memory is allocated.

    Returns:
        ``[B · T, K]``, or ``[groups, B · T, K]`` for a grouped convolution.
    """
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
