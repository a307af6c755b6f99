"""Squares for small or grouped convolutions: c_i(W) = Σ_t δ_it x̃_itᵀ of many examples at once, by batched products.

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
from lightning_bayes.curvature.workspace import Workspace

VECTOR = 16  # elements of a SIMD vector; matrix products with other row lengths take up to twice as long


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Always: this strategy supports every convolution on every device."""
    return True


def squares(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> Tensor:
    """Σ_i c_i(W)²; see `plan.WeightSquares`."""
    positions = grad_output.shape[2:]
    elements = max(_elements(layer, x, positions), layer.weight.numel())
    total: Tensor | None = None
    for x_part, grad_part in workspace.split(elements, x, grad_output):
        delta = torch.unflatten(grad_part.flatten(2), 1, (layer.groups, -1))
        parts = _parts(layer, padded(layer, x_part), positions, workspace)
        transposed = delta.shape[2] % VECTOR == 0 and parts[0].shape[2] % VECTOR != 0
        square = _products(delta, parts, transposed, workspace).square_().sum(0)
        total = square if total is None else total.add_(square)
    assert total is not None
    return _assembled(layer, total.mT if transposed else total)


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


def _products(delta: Tensor, parts: list[Tensor], transposed: bool, workspace: Workspace) -> Tensor:
    """c_i = δ_i x̃_iᵀ, ``[B, parts, groups, Cout / groups, K]``, or their transposes."""
    factors = [(part, delta) if transposed else (delta, part) for part in parts]
    shape = len(parts), *delta.shape[:2], factors[0][0].shape[2], factors[0][1].shape[2]
    products = workspace.empty("products", shape, delta)
    for product, (left, right) in zip(products.flatten(1, 2), factors, strict=True):
        torch.bmm(left.flatten(0, 1), right.flatten(0, 1).mT, out=product)
    return products.transpose(0, 1)


def _assembled(layer: Conv, values: Tensor) -> Tensor:
    """Rearrange results per part, ``[parts, groups, Cout / groups, K]``, to the shape of the weight."""
    values = values[..., : layer.weight[0].numel() // len(values)]
    columns = layer.kernel_size if len(values) == 1 else layer.kernel_size[1:]
    return torch.unflatten(values, 3, (-1, *columns)).movedim(0, 3).reshape(layer.weight.shape)
