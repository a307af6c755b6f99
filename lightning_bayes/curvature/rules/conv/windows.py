"""The windows of a convolution: the inputs of its kernel at every output position.

A copy of all patches is |kernel| times as large as the input. In two dimensions, where the kernel moves down row by row,
it is enough to copy the input once for each *column* of the kernel: what a kernel row sees at all positions is then a
range of the copy, and costs nothing. But values computed by kernel rows must be rearranged, which pays only where there
are many positions. So patches come in parts: one for each kernel row, or one for the whole kernel.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.private_torch import ConvBase

Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d

VECTOR = 16  # elements; a matrix product whose rows are not whole vectors takes up to twice as long


def goes_by_rows(layer: Conv, positions: torch.Size) -> bool:
    """Whether patches come in parts, one for each row of the kernel.

    Args:
        layer: The convolution.
        positions: Where the kernel stops, ``[*out]``.

    Returns:
        The choice.
    """
    moves_by_one = isinstance(layer, nn.Conv2d) and layer.stride[0] == 1 and layer.kernel_size[0] > 1
    return moves_by_one and positions.numel() >= layer.out_channels


def patch_parts(layer: Conv, x: Tensor, grad_output: Tensor, by_rows: bool, workspace: Workspace) -> list[Tensor]:
    """Patches of all examples, in parts whose values `assembled` puts together again.

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        grad_output: Shaped like its output, ``[B, Cout, *out]``.
        by_rows: The result of `goes_by_rows`.
        workspace: Holds the copy.

    Returns:
        Each part ``[B, groups, K, T]``; K is Cin / groups times the kernel's columns, or times the whole kernel, and
        maybe zeros behind, see `_copied`.
    """
    positions = grad_output.shape[2:]
    x = _padded_into(workspace, layer, x)
    if not by_rows:
        return [_copied(layer, input_patches(layer, x, positions), workspace)]
    unfolded = _copied(layer, _column_windows(layer, x.contiguous(), positions[1]), workspace)
    return [unfolded[..., start : start + positions.numel()] for start in _row_starts(layer, positions)]


def padded_pixels(layer: Conv, x: Tensor, workspace: Workspace) -> Tensor:
    """The input as the kernel sees it at the borders, with the channels of a pixel together in memory.

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        workspace: Holds the copy.

    Returns:
        ``[B, Cin, *padded]``.
    """
    return _padded_into(workspace, layer, x, channels_last=True)


def pixel_parts(layer: Conv, pixels: Tensor, positions: torch.Size, by_rows: bool, workspace: Workspace) -> Tensor:
    """`patch_parts` for one group, with positions before channels, channels last, and all parts in one view.

    Whole pixels are copied, faster than single values where there are many channels, and a matrix product with rows that
    lie together in memory is faster too.

    Args:
        layer: The convolution.
        pixels: Examples of its input, from `padded_pixels`.
        positions: Where the kernel stops, ``[*out]``.
        by_rows: The result of `goes_by_rows`.
        workspace: Holds the copy.

    Returns:
        ``[B, parts, T, K]``, where K is the kernel's columns or the whole kernel, times Cin.
    """
    if by_rows:
        windows = _column_windows(layer, pixels, positions[1]).permute(0, 3, 4, 2, 1)
    else:
        axes = range(2, 2 + len(positions))
        windows = _windows(layer, pixels, positions)
        windows = windows.permute(0, *(axis + len(axes) for axis in axes), *axes, 1)
    copied = workspace.empty("patches", windows.shape, pixels).copy_(windows)
    if not by_rows:
        return copied.view(len(pixels), 1, positions.numel(), -1)
    copied = copied.view(len(pixels), pixels.shape[2] * positions[1], -1)
    return copied.unfold(1, positions.numel(), layer.dilation[0] * positions[1]).transpose(2, 3)


def channels_first(layer: Conv, values: Tensor) -> Tensor:
    """Arrange products of `pixel_parts` like the layer's weight.

    Args:
        layer: The convolution.
        values: ``[parts, rows, K]``, contiguous; some rows of the weight.

    Returns:
        A view, ``[rows, Cin, *kernel]``.
    """
    by_row = (len(values), values.shape[1], *layer.kernel_size[len(values) > 1 :], layer.in_channels)
    pixels = values.view(by_row).movedim(-1, 1)  # [parts, Cin, rows, *kernel]
    return pixels[0].transpose(0, 1) if len(values) == 1 else pixels.permute(2, 1, 0, 3)


def assembled(layer: Conv, values: Tensor, workspace: Workspace) -> Tensor:
    """Shape values of the parts like the layer's weight.

    Args:
        layer: The convolution.
        values: ``[parts, groups, Cout / groups, K]``, with what was put behind.
        workspace: Gives memory for values that have to be rearranged.

    Returns:
        ``[Cout, Cin / groups, *kernel]``.
    """
    values = values[..., : layer.weight[0].numel() // len(values)]
    if len(values) == 1 and values.is_contiguous():
        return values.view(layer.weight.shape)
    columns = layer.kernel_size if len(values) == 1 else layer.kernel_size[1:]
    by_rows = torch.unflatten(values, 3, (-1, *columns)).movedim(0, 3)
    return workspace.result(by_rows.shape, values).copy_(by_rows).view(layer.weight.shape)


def patch_elements(layer: Conv, x: Tensor, grad_output: Tensor, by_rows: bool) -> int:
    """Elements of one example's patches, about; arguments as in `patch_parts`."""
    if by_rows:
        return layer.in_channels * layer.kernel_size[1] * grad_output.shape[3] * (x.shape[2] + layer.kernel_size[0])
    return layer.groups * layer.weight[0].numel() * grad_output.shape[2:].numel()


def input_patches(layer: ConvBase, x: Tensor, positions: torch.Size) -> Tensor:
    """Every patch that the kernel sees: a view, which copies faster than `torch.nn.functional.unfold`.

    Args:
        layer: Gives kernel size, stride and dilation.
        x: Padded input, ``[B, C, *in]``.
        positions: Where the kernel stops, ``[*out]``.

    Returns:
        Patches, ``[B, C, *kernel, *out]``.
    """
    return _windows(layer, x.contiguous(), positions)


def padded(layer: Conv, x: Tensor) -> Tensor:
    """The input as the kernel sees it at the borders."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    last_axis_first = [amount for axis in reversed(range(x.dim() - 2)) for amount in padding(layer, axis)]
    return F.pad(x, last_axis_first, mode) if any(last_axis_first) else x


def padding(layer: Conv, axis: int) -> tuple[int, int]:
    """Pixels that `layer` adds before and after the axis of its input; axis 0 is the first of space."""
    if layer.padding == "same":  # stride is 1; the odd one goes to the right, as in torch
        total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        return total // 2, total - total // 2
    amount = 0 if layer.padding == "valid" else int(layer.padding[axis])
    return amount, amount


def _padded_into(workspace: Workspace, layer: Conv, x: Tensor, channels_last: bool = False) -> Tensor:
    """`padded` in memory of the workspace; with `channels_last` the channels lie together in it."""
    borders = [padding(layer, axis) for axis in range(x.dim() - 2)]
    if layer.padding_mode != "zeros" and any(map(any, borders)):
        x, borders = padded(layer, x), [(0, 0)] * len(borders)
    in_place = x.movedim(1, -1).is_contiguous() if channels_last else True
    if in_place and not any(map(any, borders)):
        return x
    shape = [size + before + after for size, (before, after) in zip(x.shape[2:], borders, strict=True)]
    if channels_last:
        whole = workspace.empty("padded", (len(x), *shape, x.shape[1]), x).movedim(-1, 1)
    else:
        whole = workspace.empty("padded", (*x.shape[:2], *shape), x)
    inside = whole.zero_()
    for axis, (size, (before, _)) in enumerate(zip(x.shape[2:], borders, strict=True), start=2):
        inside = inside.narrow(axis, before, size)
    inside.copy_(x)
    return whole


def _windows(layer: ConvBase, x: Tensor, positions: torch.Size) -> Tensor:
    """The windows of `x` as a view of its memory, ``[B, C, *kernel, *out]``."""
    batch, channel, *axes = x.stride()
    within = [axis * step for axis, step in zip(axes, layer.dilation, strict=True)]
    between = [axis * step for axis, step in zip(axes, layer.stride, strict=True)]
    return x.as_strided((*x.shape[:2], *layer.kernel_size, *positions), (batch, channel, *within, *between))


def _copied(layer: Conv, windows: Tensor, workspace: Workspace) -> Tensor:
    """The windows, ``[B, Cin, *offsets, *pixels]``, as ``[B, groups, Cin / groups · offsets, pixels]``."""
    # Zeros are put behind where products with the rows of δ would otherwise have no whole vectors.
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
    """The windows of a row of the kernel as a view of the memory of `x`, ``[B, C, columns, height, width]``."""
    batch, channel, row, column = x.stride()
    shape = (*x.shape[:2], layer.kernel_size[1], x.shape[2], width)
    return x.as_strided(shape, (batch, channel, column * layer.dilation[1], row, column * layer.stride[1]))


def _row_starts(layer: Conv, positions: torch.Size) -> list[int]:
    return [row * layer.dilation[0] * positions[1] for row in range(layer.kernel_size[0])]
