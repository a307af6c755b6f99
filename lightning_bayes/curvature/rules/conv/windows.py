"""The windows of a convolution: the inputs of its kernel at every output position.

A copy of all patches is |kernel| times as large as the input. In two dimensions with vertical stride 1, one copy of the
input per kernel *column* suffices: the patches of each kernel row are a contiguous range of the copy. But results per kernel
row must be rearranged, which is worthwhile only with many positions. So patches come in parts: one per kernel row, or a
single part for the whole kernel.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.private_torch import ConvBase

Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d

VECTOR = 16  # elements of a SIMD vector; matrix products with other row lengths take up to twice as long


def goes_by_rows(layer: Conv, positions: torch.Size) -> bool:
    """Whether to split patches by kernel rows, for a convolution with output positions ``[*out]``."""
    moves_by_one = isinstance(layer, nn.Conv2d) and layer.stride[0] == 1 and layer.kernel_size[0] > 1
    return moves_by_one and positions.numel() >= layer.out_channels


def patch_parts(layer: Conv, x: Tensor, grad_output: Tensor, by_rows: bool, workspace: Workspace) -> list[Tensor]:
    """Patches of all examples in parts; `assembled` reassembles results that were computed per part.

    Args:
        layer: The convolution.
        x: Input, ``[B, Cin, *in]``.
        grad_output: A tensor shaped like the output, ``[B, Cout, *out]``.
        by_rows: The result of `goes_by_rows`.
        workspace: Provides the memory of the copy.

    Returns:
        Parts ``[B, groups, K, T]``. K is Cin / groups times the kernel columns, or times the whole kernel, plus zero
        padding; see `_copied`.
    """
    positions = grad_output.shape[2:]
    x = padded(layer, x)
    if not by_rows:
        return [_copied(layer, input_patches(layer, x, positions), workspace)]
    unfolded = _copied(layer, _column_windows(layer, x.contiguous(), positions[1]), workspace)
    starts = [row * layer.dilation[0] * positions[1] for row in range(layer.kernel_size[0])]
    return [unfolded[..., start : start + positions.numel()] for start in starts]


def pixel_patches(layer: Conv, x: Tensor, positions: torch.Size, workspace: Workspace) -> Tensor:
    """Patches of all examples for one group, channels last: ``[B, T, |kernel| · Cin]``."""
    # Copying whole pixels is faster with many channels. Matrix products with contiguous rows are faster, too.
    pixels = padded(layer, x).movedim(1, -1).contiguous().movedim(-1, 1)
    windows = _windows(layer, pixels, positions)
    axes = range(2, 2 + len(positions))
    windows = windows.permute(0, *(axis + len(axes) for axis in axes), *axes, 1)
    return workspace.empty("patches", windows.shape, x).copy_(windows).view(len(x), positions.numel(), -1)


def assembled(layer: Conv, values: Tensor, workspace: Workspace) -> Tensor:
    """Rearrange results of `patch_parts`, ``[parts, groups, Cout / groups, K]``, to the shape of the weight."""
    values = values[..., : layer.weight[0].numel() // len(values)]
    if len(values) == 1 and values.is_contiguous():
        return values.view(layer.weight.shape)
    columns = layer.kernel_size if len(values) == 1 else layer.kernel_size[1:]
    by_rows = torch.unflatten(values, 3, (-1, *columns)).movedim(0, 3)
    return workspace.result(by_rows.shape, values).copy_(by_rows).view(layer.weight.shape)


def patch_elements(layer: Conv, x: Tensor, grad_output: Tensor, by_rows: bool) -> int:
    """The approximate number of elements of one example's patches; arguments as in `patch_parts`."""
    if by_rows:
        return layer.in_channels * layer.kernel_size[1] * grad_output.shape[3] * (x.shape[2] + layer.kernel_size[0])
    return layer.groups * layer.weight[0].numel() * grad_output.shape[2:].numel()


def input_patches(layer: ConvBase, x: Tensor, positions: torch.Size) -> Tensor:
    """All patches of a padded input as a view ``[B, C, *kernel, *out]``, which copies faster than `F.unfold`."""
    return _windows(layer, x.contiguous(), positions)


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


def _windows(layer: ConvBase, x: Tensor, positions: torch.Size) -> Tensor:
    """All windows of `x` as a view, ``[B, C, *kernel, *out]``."""
    batch, channel, *axes = x.stride()
    within = [axis * step for axis, step in zip(axes, layer.dilation, strict=True)]
    between = [axis * step for axis, step in zip(axes, layer.stride, strict=True)]
    return x.as_strided((*x.shape[:2], *layer.kernel_size, *positions), (batch, channel, *within, *between))


def _copied(layer: Conv, windows: Tensor, workspace: Workspace) -> Tensor:
    """Copy windows ``[B, Cin, *offsets, *pixels]`` to ``[B, groups, Cin / groups · offsets, pixels]``."""
    # Zero rows are appended if products with the rows of δ would otherwise not consist of whole vectors.
    by_group = torch.unflatten(windows, 1, (layer.groups, -1))
    pixels = windows.shape[-len(layer.kernel_size) :].numel()
    rows = by_group[0, 0].numel() // pixels
    is_short = layer.out_channels // layer.groups % VECTOR and rows % VECTOR > VECTOR // 2
    shape = *by_group.shape[:2], rows + (-rows % VECTOR if is_short else 0), pixels
    copied = workspace.empty("patches", shape, windows)
    copied[:, :, rows:].zero_()
    copied[:, :, :rows].view(by_group.shape).copy_(by_group)
    return copied


def _column_windows(layer: Conv, x: Tensor, width: int) -> Tensor:
    """The windows of one kernel row, one pixel high, as a view of `x`, ``[B, C, columns, height, width]``."""
    batch, channel, row, column = x.stride()
    shape = (*x.shape[:2], layer.kernel_size[1], x.shape[2], width)
    return x.as_strided(shape, (batch, channel, column * layer.dilation[1], row, column * layer.stride[1]))
