"""The inputs and output gradients of a layer's weight matrix at every position of every example.

A layer with weight sharing applies one matrix W (bias as last column) at T positions: s_it = W ā_it, where ā_it ends with
a 1 if there is a bias. The gradient of example i is Σ_t δ_it ā_itᵀ. A linear layer's positions are the dimensions between
the example and the features; a convolution's are its output positions, and ā_it is an input patch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.conv.windows import Conv, input_patches, padded
from lightning_bayes.curvature.workspace import Workspace

Rows: TypeAlias = Callable[[Any, Tensor], Tensor]


def input_rows(layer: nn.Module, x: Tensor, bias: bool, workspace: Workspace | None = None) -> Tensor:
    """The vectors ā_it.

    Args:
        layer: ``nn.Linear`` or ``nn.Conv1d/2d/3d``.
        x: Its input, ``[B, …]``.
        bias: Whether ā ends with a 1.
        workspace: Holds the patches of a convolution until the next call, instead of memory of their own.

    Returns:
        ``[B · T, K]``, or ``[groups, B · T, K]`` for a convolution with groups.
    """
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        rows = _conv_columns(layer, x, bias, workspace).mT
        return rows[0] if layer.groups == 1 else rows
    rows = x.flatten(0, -2)
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1) if bias else rows


def output_rows(layer: nn.Module, grad_output: Tensor) -> Tensor:
    """The vectors δ_it.

    Args:
        layer: As in `input_rows`.
        grad_output: Gradient with respect to its output, ``[B, …]``.

    Returns:
        ``[B · T, out]``, or ``[groups, B · T, out / groups]``.
    """
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        grouped = torch.unflatten(grad_output.flatten(2), 1, (layer.groups, -1))  # [B, groups, out / groups, T]
        return _as_rows(grouped)
    return grad_output.flatten(0, -2)


def _conv_columns(layer: Conv, x: Tensor, bias: bool, workspace: Workspace | None) -> Tensor:
    """ā_it as columns, ``[groups, K, B · T]``: copied once, along the positions, which lie together in the input."""
    x = padded(layer, x)
    positions = torch.Size(
        (size - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, dilation in zip(
            x.shape[2:], layer.kernel_size, layer.stride, layer.dilation, strict=True
        )
    )
    patches = torch.unflatten(
        input_patches(layer, x, positions), 1, (layer.groups, -1)
    )  # [B, groups, C, *kernel, *out]
    patches = patches.movedim(0, -1 - len(positions))
    size, shape = layer.weight[0].numel(), (layer.groups, layer.weight[0].numel() + bias, len(x) * positions.numel())
    columns = x.new_empty(shape) if workspace is None else workspace.empty("factor columns", shape, x)
    columns[:, :size].view(patches.shape).copy_(patches)
    columns[:, size:] = 1
    return columns


def _as_rows(values: Tensor) -> Tensor:
    """``[B, groups, K, T]`` to ``[groups, B · T, K]``, without the first dimension if it is 1."""
    rows = values.permute(1, 0, 3, 2).flatten(1, 2)
    return rows[0] if len(rows) == 1 else rows
