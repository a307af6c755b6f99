"""A convolution with many weights: its sums from every c_i, computed example by example in the processors' caches.

c_i(W) = Σ_t δ_it x̃_itᵀ takes as many operations for all i as the batch's own gradient. Where it is large, writing it and
reading it again costs more than they do, so rows of the weight are taken a block at a time: the block's product of one
example and its two sums stay in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_bayes.curvature.rules.patches import (
    Conv,
    channels_first,
    goes_by_rows,
    padded_pixels,
    patch_elements,
    pixel_parts,
)
from lightning_bayes.curvature.workspace import Workspace

BLOCK_ELEMENTS = 3 * 2**16  # for each processor; 768 KiB of float32, measured with 2 MiB of L2 cache each


def sums_by_blocks(layer: Conv, x: Tensor, grad_output: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i(W) and Σ_i c_i(W)², for one group.

    Args:
        layer: The convolution.
        x: Its input, ``[B, Cin, *in]``.
        grad_output: Gradient of its output, ``[B, Cout, *out]``.
        workspace: Holds patches, products and sums.

    Returns:
        Both, shaped like the weight.
    """
    by_rows, rows = goes_by_rows(layer, grad_output.shape[2:]), _rows_of_a_block(layer)
    # Processors take whole matrices of a batched product, and so their own share of what follows: one for each of them.
    lanes = math.gcd(rows, layer.out_channels, torch.get_num_threads())
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
            sums = _sums_of_rows(delta, patches, _parts(layer, by_rows), workspace)
            for total, found in zip(totals, sums, strict=True):
                result, values = total[first : first + rows], channels_first(layer, found)
                result.copy_(values) if i == 0 else result.add_(values)
    return totals


def _rows_of_a_block(layer: Conv) -> int:
    rows = layer.out_channels
    while rows * layer.weight[0].numel() > BLOCK_ELEMENTS * torch.get_num_threads() and rows > 1:
        rows = (rows + 1) // 2
    return rows


def _parts(layer: Conv, by_rows: bool) -> tuple[int, int]:
    """How many parts patches have, and elements of each."""
    parts = layer.kernel_size[0] if by_rows else 1
    return parts, layer.weight[0].numel() // parts


def _sums_of_rows(
    delta: Tensor, patches: Iterable[Sequence[Tensor]], parts: tuple[int, int], workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² of some rows of the weight.

    Args:
        delta: δ, ``[B, lanes, rows / lanes, T]``.
        patches: Those of each example, in parts ``[lanes, T, K]``, the same for every lane.
        parts: Number of parts, and K.
        workspace: Holds products and sums.

    Returns:
        Both, ``[parts, rows, K]``.
    """
    shape = parts[0], delta.shape[1:3].numel(), parts[1]
    product, grad, square = (
        workspace.empty(of, shape, delta) for of in ("products", "sums of rows", "squares of rows")
    )
    grad, square = grad.zero_(), square.zero_()
    matrices = torch.unflatten(product, 1, delta.shape[1:3]).unbind()
    for one_delta, one_patches in zip(delta, patches, strict=True):
        for matrix, part in zip(matrices, one_patches, strict=True):
            torch.bmm(one_delta, part, out=matrix)
        grad += product
        square.addcmul_(product, product)
    return grad, square
