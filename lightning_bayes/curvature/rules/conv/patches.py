"""Sums for small or grouped convolutions: c_i(W) = Σ_t δ_it x̃_itᵀ of many examples at once, by batched products.

A copy of all patches is |kernel| times as large as the input. In two dimensions with vertical stride 1, one copy of the
input per kernel *column* suffices: the patches of each kernel row are a contiguous range of the copy. But results per kernel
row must be rearranged, which is worthwhile only with many positions. So patches come in parts: one per kernel row, or a
single part for the whole kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.rules.conv.shape import ConvShape
from lightning_bayes.curvature.rules.conv.windows import Conv, input_patches, padded, windows_of
from lightning_bayes.curvature.rules.registry import Sums, add_sums
from lightning_bayes.curvature.workspace import Workspace

VECTOR = 16  # elements of a SIMD vector; matrix products with other row lengths take up to twice as long


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Always: this strategy supports every convolution on every device."""
    return True


def sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)²; see `plan.WeightSums`."""
    positions = grad_output.shape[2:]
    elements = max(_elements(layer, x, positions), layer.weight.numel())
    totals: Sums = {}
    for x_part, grad_part in workspace.split(elements, x, grad_output):
        delta = torch.unflatten(grad_part.flatten(2), 1, (layer.groups, -1))
        parts = _parts(layer, padded(layer, x_part), positions, workspace)
        add_sums(totals, "weight", _products(delta, parts, workspace))
    grad, square = totals["weight"]
    return _assembled(layer, grad), _assembled(layer, square)


def goes_by_rows(layer: Conv, positions: torch.Size) -> bool:
    """Whether to split patches by kernel rows, for a convolution with output positions ``[*out]``."""
    moves_by_one = isinstance(layer, nn.Conv2d) and layer.stride[0] == 1 and layer.kernel_size[0] > 1
    return moves_by_one and positions.numel() >= layer.out_channels


def _elements(layer: Conv, x: Tensor, positions: torch.Size) -> int:
    """The approximate number of elements of one example's patches."""
    if goes_by_rows(layer, positions):
        return layer.in_channels * layer.kernel_size[1] * positions[1] * (x.shape[2] + layer.kernel_size[0])
    return layer.groups * layer.weight[0].numel() * positions.numel()


def _parts(layer: Conv, x: Tensor, positions: torch.Size, workspace: Workspace) -> list[Tensor]:
    """Patches of a padded input in parts ``[B, groups, K, T]``; K counts the values of a patch and zeros, see `_copied`."""
    if not goes_by_rows(layer, positions):
        return [_copied(layer, input_patches(layer, x, positions), workspace)]
    kernel, stride, width = (1, layer.kernel_size[1]), (1, layer.stride[1]), positions[1]
    rows = windows_of(x.contiguous(), kernel, stride, layer.dilation, (x.shape[2], width))  # of one kernel row
    copied = _copied(layer, rows, workspace)
    starts = [row * layer.dilation[0] * width for row in range(layer.kernel_size[0])]
    return [copied[..., start : start + positions.numel()] for start in starts]


def _copied(layer: Conv, patches: Tensor, workspace: Workspace) -> Tensor:
    """Copy windows ``[B, Cin, *offsets, *pixels]`` to ``[B, groups, Cin / groups · offsets, pixels]``."""
    # Zero rows are appended if products with the rows of δ would otherwise not consist of whole vectors.
    by_group = torch.unflatten(patches, 1, (layer.groups, -1))
    pixels = patches.shape[-len(layer.kernel_size) :].numel()
    rows = by_group[0, 0].numel() // pixels
    is_short = layer.out_channels // layer.groups % VECTOR and rows % VECTOR > VECTOR // 2
    shape = *by_group.shape[:2], rows + (-rows % VECTOR if is_short else 0), pixels
    copied = workspace.empty("patches", shape, patches)
    copied[:, :, rows:].zero_()
    copied[:, :, :rows].view(by_group.shape).copy_(by_group)
    return copied


def _products(delta: Tensor, parts: list[Tensor], workspace: Workspace) -> Tensor:
    """c_i = δ_i x̃_iᵀ, ``[B, parts, groups, Cout / groups, K]``."""
    rows, columns = delta.shape[2], parts[0].shape[2]
    transposed = rows % VECTOR == 0 and columns % VECTOR != 0
    shape = (columns, rows) if transposed else (rows, columns)
    products = workspace.empty("products", (len(parts), *delta.shape[:2], *shape), delta)
    for product, patches in zip(products.flatten(1, 2), parts, strict=True):
        first, second = (patches, delta) if transposed else (delta, patches)
        torch.bmm(first.flatten(0, 1), second.flatten(0, 1).transpose(1, 2), out=product)
    return (products.mT if transposed else products).transpose(0, 1)


def _assembled(layer: Conv, values: Tensor) -> Tensor:
    """Rearrange results per part, ``[parts, groups, Cout / groups, K]``, to the shape of the weight."""
    values = values[..., : layer.weight[0].numel() // len(values)]
    columns = layer.kernel_size if len(values) == 1 else layer.kernel_size[1:]
    return torch.unflatten(values, 3, (-1, *columns)).movedim(0, 3).reshape(layer.weight.shape)
