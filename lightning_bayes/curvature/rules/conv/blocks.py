"""A convolution with many weights: its sums from every c_i(W) = Σ_t δ_it x̃_itᵀ, by `rules.products`."""

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
    """Whether c_i(W) is large; an accelerator would wait for one small kernel after the other."""
    return shape.groups == 1 and device.type == "cpu" and shape.weights > MIN_ELEMENTS


def sums(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)², for one group.

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        grad_output: Gradient of its output, ``[B, Cout, *out]``.
        workspace: Holds patches, products and sums.

    Returns:
        Both, shaped like the weight.
    """
    by_rows = goes_by_rows(layer, grad_output.shape[2:])
    rows, lanes = block_of(layer.out_channels, layer.weight[0].numel())
    elements = patch_elements(layer, x, grad_output, by_rows)
    # Patches that a single block reads stay in the cache too.
    few = max(1, BLOCK_ELEMENTS // elements) if rows == layer.out_channels else len(x)
    totals = workspace.result(layer.weight.shape, x), workspace.result(layer.weight.shape, x)
    for i, (some, grads) in enumerate(workspace.split(x[:1].numel() + elements, x, grad_output)):
        pixels = torch.split(padded_pixels(layer, some, workspace), few)
        parts = (pixel_parts(layer, p, grads.shape[2:], by_rows, workspace) for p in pixels)
        each = (one.unsqueeze(1).expand(-1, lanes, -1, -1).unbind() for those in parts for one in those)
        patches = each if rows == layer.out_channels else list(each)
        for first in range(0, layer.out_channels, rows):
            delta = torch.unflatten(grads[:, first : first + rows].flatten(2), 1, (lanes, -1))
            found = sums_of_block(delta, patches, _parts(layer, by_rows), workspace)
            for total, part in zip(totals, found, strict=True):
                result, values = total[first : first + rows], channels_first(layer, part)
                result.copy_(values) if i == 0 else result.add_(values)
    return totals


def _parts(layer: Conv, by_rows: bool) -> tuple[int, int]:
    """How many parts patches have, and elements of each."""
    parts = layer.kernel_size[0] if by_rows else 1
    return parts, layer.weight[0].numel() // parts
