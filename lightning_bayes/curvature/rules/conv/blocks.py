"""Squares for convolutions with many weights: every c_i(W) = Σ_t δ_it x̃_itᵀ, block by block; see `rules.products`."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv.shape import ConvShape
from lightning_bayes.curvature.rules.conv.windows import Conv, padded, windows_of
from lightning_bayes.curvature.rules.products import BLOCK_ELEMENTS, is_single_block, squares_by_blocks
from lightning_bayes.curvature.workspace import Workspace

MIN_ELEMENTS = 2**13  # of one c_i(W)


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Whether c_i(W) is large. On an accelerator, launching many small kernels would dominate."""
    return shape.groups == 1 and device.type == "cpu" and shape.weights > MIN_ELEMENTS


def squares(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> Tensor:
    """Σ_i c_i(W)² for one group; see `plan.WeightSquares`."""
    positions, columns = grad_output.shape[2:], layer.weight[0].numel()
    elements = positions.numel() * columns  # of one example's patches
    # A single block reads the patches once, so few of them at a time stay in the cache.
    is_single = is_single_block(layer.out_channels, columns)
    chunk = max(1, BLOCK_ELEMENTS // elements) if is_single else len(x)
    result = x.new_empty(layer.weight.shape)
    for i, (x_part, grad_part) in enumerate(workspace.split(x[:1].numel() + elements, x, grad_output)):
        chunks = (_patches(layer, pixels, positions, workspace) for pixels in torch.split(x_part, chunk))
        patches = (example for patches_of_chunk in chunks for example in patches_of_chunk)
        squares_by_blocks(grad_part.flatten(2), patches, result.movedim(1, -1), workspace, accumulate=i > 0)
    return result


def _patches(layer: Conv, x: Tensor, positions: torch.Size, workspace: Workspace) -> Tensor:
    """Patches of all examples, channels last: ``[B, T, |kernel| · Cin]``."""
    # Copying whole pixels is faster with many channels. Matrix products with contiguous rows are faster, too.
    pixels = padded(layer, x).movedim(1, -1).contiguous().movedim(-1, 1)
    patches = windows_of(pixels, layer.kernel_size, layer.stride, layer.dilation, positions)
    axes = range(2, 2 + len(positions))
    patches = patches.permute(0, *(axis + len(axes) for axis in axes), *axes, 1)
    return workspace.empty("patches", patches.shape, x).copy_(patches).view(len(x), positions.numel(), -1)
