"""The windows of a convolution: the inputs of its kernel at every output position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
    borders = borders_of(layer.padding, layer.kernel_size, layer.dilation)
    last_axis_first = [amount for border in reversed(borders) for amount in border]
    return F.pad(x, last_axis_first, mode) if any(last_axis_first) else x


@lru_cache(maxsize=256)
def borders_of(
    padding: str | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Padding before and after each spatial axis."""
    if padding == "same":  # the stride is 1; torch adds the odd pixel at the end
        totals = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    amounts = (0,) * len(kernel) if isinstance(padding, str) else padding
    return tuple((amount, amount) for amount in amounts)
