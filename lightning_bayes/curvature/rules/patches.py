"""What a convolution's kernel sees at every output position.

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

Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


def goes_by_rows(layer: Conv, grad_output: Tensor) -> bool:
    """Whether patches come in parts, one for each row of the kernel.

    Args:
        layer: The convolution.
        grad_output: Shaped like its output for the whole batch, ``[B, Cout, *out]``.

    Returns:
        The choice, which must be the same for all examples whose values are added.
    """
    many_positions = len(grad_output) * grad_output.shape[2:].numel() >= 4 * layer.out_channels
    return isinstance(layer, nn.Conv2d) and layer.stride[0] == 1 and layer.kernel_size[0] > 1 and many_positions


def patch_parts(layer: Conv, x: Tensor, grad_output: Tensor, by_rows: bool, workspace: Workspace) -> list[Tensor]:
    """Patches of all examples, in parts whose values `assembled` puts together again.

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        grad_output: Shaped like its output, ``[B, Cout, *out]``.
        by_rows: From `goes_by_rows`.
        workspace: Holds the copy.

    Returns:
        Each part ``[B, groups, K, T]``; K is Cin / groups times the kernel's columns, or times the whole kernel.
    """
    positions = grad_output.shape[2:]
    x = _padded_into(workspace, layer, x)
    if not by_rows:
        patches = input_patches(layer, x, positions)
        copied = workspace.empty("patches", patches.shape, x).copy_(patches)
        return [copied.view(*_grouped(layer, x), -1, positions.numel())]
    unfolded = _unfolded_columns(layer, x, positions[1], workspace)
    starts = [row * layer.dilation[0] * positions[1] for row in range(layer.kernel_size[0])]
    return [unfolded[..., start : start + positions.numel()] for start in starts]


def positions_first(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> Tensor:
    """Patches of all examples, ``[T, B, Cin · |kernel|]``; for one group.

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        grad_output: Shaped like its output, ``[B, Cout, *out]``.
        workspace: Holds the copy.

    Returns:
        The copy.
    """
    patches = input_patches(layer, _padded_into(workspace, layer, x), grad_output.shape[2:])
    axes = range(patches.dim())
    patches = patches.permute(*axes[-x.dim() + 2 :], *axes[: -x.dim() + 2])  # [*out, B, Cin, *kernel]
    return workspace.empty("patches", patches.shape, x).copy_(patches).view(-1, len(x), layer.weight[0].numel())


def assembled(layer: Conv, values: Tensor, workspace: Workspace) -> Tensor:
    """Shape values of the parts like the layer's weight.

    Args:
        layer: The convolution.
        values: ``[parts, groups, Cout / groups, K]``, contiguous.
        workspace: Gives memory for values that have to be rearranged.

    Returns:
        ``[Cout, Cin / groups, *kernel]``.
    """
    if len(values) == 1:
        return values.view(layer.weight.shape)
    by_rows = torch.unflatten(values, 3, (-1, layer.kernel_size[1])).permute(1, 2, 3, 0, 4)
    return workspace.result(by_rows.shape, values).copy_(by_rows).view(layer.weight.shape)


def patch_elements(layer: Conv, x: Tensor, grad_output: Tensor, by_rows: bool) -> int:
    """Elements of one example's patches, about; arguments as in `patch_parts`."""
    if by_rows:
        return layer.in_channels * layer.kernel_size[1] * grad_output.shape[3] * (x.shape[2] + layer.kernel_size[0])
    return layer.groups * layer.weight[0].numel() * grad_output.shape[2:].numel()


def input_patches(layer: nn.modules.conv._ConvNd, x: Tensor, positions: torch.Size) -> Tensor:
    """Every patch that the kernel sees: a view, which copies faster than `torch.nn.functional.unfold`.

    Args:
        layer: Gives kernel size, stride and dilation.
        x: Padded input, ``[B, C, *in]``.
        positions: Where the kernel stops, ``[*out]``.

    Returns:
        Patches, ``[B, C, *kernel, *out]``.
    """
    x = x.contiguous()
    batch, channel, *axes = x.stride()
    within = [axis * step for axis, step in zip(axes, layer.dilation, strict=True)]
    between = [axis * step for axis, step in zip(axes, layer.stride, strict=True)]
    return x.as_strided((*x.shape[:2], *layer.kernel_size, *positions), (batch, channel, *within, *between))


def padded(layer: Conv, x: Tensor) -> Tensor:
    """The input as the kernel sees it at the borders."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    last_axis_first = [amount for axis in reversed(range(x.dim() - 2)) for amount in _padding(layer, axis)]
    return F.pad(x, last_axis_first, mode) if any(last_axis_first) else x


def _padding(layer: Conv, axis: int) -> tuple[int, int]:
    if layer.padding == "same":  # stride is 1; the odd one goes to the right, as in torch
        total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
        return total // 2, total - total // 2
    amount = 0 if layer.padding == "valid" else int(layer.padding[axis])
    return amount, amount


def _padded_into(workspace: Workspace, layer: Conv, x: Tensor) -> Tensor:
    borders = [_padding(layer, axis) for axis in range(x.dim() - 2)]
    if layer.padding_mode != "zeros" or not any(map(any, borders)):
        return padded(layer, x)
    shape = [size + before + after for size, (before, after) in zip(x.shape[2:], borders, strict=True)]
    whole = workspace.empty("padded", (*x.shape[:2], *shape), x).zero_()
    inside = whole
    for axis, (size, (before, _)) in enumerate(zip(x.shape[2:], borders, strict=True), start=2):
        inside = inside.narrow(axis, before, size)
    inside.copy_(x)
    return whole


def _unfolded_columns(layer: Conv, x: Tensor, width: int, workspace: Workspace) -> Tensor:
    """The input at every column offset of the kernel, ``[B, groups, Cin / groups · columns, height · width]``."""
    x = x.contiguous()
    batch, channel, row, column = x.stride()
    shape = (*x.shape[:2], layer.kernel_size[1], x.shape[2], width)
    strides = (batch, channel, column * layer.dilation[1], row, column * layer.stride[1])
    unfolded = workspace.empty("patches", shape, x).copy_(x.as_strided(shape, strides))
    return unfolded.view(*_grouped(layer, x), -1, x.shape[2] * width)


def _grouped(layer: Conv, x: Tensor) -> tuple[int, int]:
    return len(x), layer.groups
