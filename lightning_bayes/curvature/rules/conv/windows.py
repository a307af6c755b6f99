"""The windows of a convolution: the inputs of its kernel at every output position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.private_torch import ConvBase

Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


def input_patches(layer: ConvBase, x: Tensor, positions: torch.Size) -> Tensor:
    """All patches of a padded input as a view ``[B, C, *kernel, *out]``, which copies faster than `F.unfold`."""
    return windows_of(x.contiguous(), layer.kernel_size, layer.stride, layer.dilation, positions)


def windows_of(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """The windows of `x` ``[B, C, *in]`` as a view, ``[B, C, *kernel, *positions]``."""
    batch, channel, *axes = x.stride()
    within = [axis * step for axis, step in zip(axes, dilation, strict=True)]
    between = [axis * step for axis, step in zip(axes, stride, strict=True)]
    return x.as_strided((*x.shape[:2], *kernel, *positions), (batch, channel, *within, *between))


def padded(layer: Conv, x: Tensor) -> Tensor:
    """The input with the layer's padding."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    last_axis_first = [amount for axis in reversed(range(x.dim() - 2)) for amount in padding(layer, axis)]
    return F.pad(x, last_axis_first, mode) if any(last_axis_first) else x


def padding(layer: Conv, axis: int) -> tuple[int, int]:
    """Padding that `layer` adds before and after a spatial axis; the first spatial axis is 0."""
    if layer.padding == "same":  # the stride is 1; torch adds the odd pixel at the end
        total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        return total // 2, total - total // 2
    amount = 0 if layer.padding == "valid" else int(layer.padding[axis])
    return amount, amount
