"""Sums for convolutions with many weights: every c_i(W) = Σ_t δ_it x̃_itᵀ, block by block; see `rules.products`."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.conv.shape import ConvShape
from lightning_bayes.curvature.rules.conv.windows import (
    Conv,
    channels_first,
    goes_by_rows,
    padded_pixels,
    patch_elements,
    pixel_parts,
)
from lightning_bayes.curvature.rules.products import BLOCK_ELEMENTS, block_of, sums_of_block
from lightning_bayes.curvature.workspace import Workspace

MIN_ELEMENTS = 2**13  # of one c_i(W)


def suits(shape: ConvShape, device: torch.device) -> bool:
    """Whether c_i(W) is large. On an accelerator, launching many small kernels would dominate."""
    return shape.groups == 1 and device.type == "cpu" and shape.weights > MIN_ELEMENTS


def sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)² for one group; see `plan.WeightSums`."""
    by_rows = goes_by_rows(layer, grad_output.shape[2:])
    rows, lanes = block_of(layer.out_channels, layer.weight[0].numel())
    elements = patch_elements(layer, x, grad_output, by_rows)
    is_single_block = rows == layer.out_channels
    # A single block reads the patches once, so few of them at a time stay in the cache.
    chunk = max(1, BLOCK_ELEMENTS // elements) if is_single_block else len(x)
    num_parts = layer.kernel_size[0] if by_rows else 1
    parts = num_parts, layer.weight[0].numel() // num_parts
    totals = workspace.result(layer.weight.shape, x), workspace.result(layer.weight.shape, x)
    for i, (x_part, grad_part) in enumerate(workspace.split(x[:1].numel() + elements, x, grad_output)):
        chunks = torch.split(padded_pixels(layer, x_part, workspace), chunk)
        chunk_patches = (pixel_parts(layer, pixels, grad_part.shape[2:], by_rows, workspace) for pixels in chunks)
        by_example = (
            example.unsqueeze(1).expand(-1, lanes, -1, -1).unbind() for patches in chunk_patches for example in patches
        )
        values = by_example if is_single_block else list(by_example)
        for first in range(0, layer.out_channels, rows):
            delta = torch.unflatten(grad_part[:, first : first + rows].flatten(2), 1, (lanes, -1))
            for total, block in zip(totals, sums_of_block(delta, values, parts, workspace), strict=True):
                target, result = total[first : first + rows], channels_first(layer, block)
                target.copy_(result) if i == 0 else target.add_(result)
    return totals
