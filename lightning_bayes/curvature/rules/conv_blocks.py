"""A convolution with many weights: its sums from every c_i, computed example by example in the processors' caches.

c_i(W) = Σ_t δ_it x̃_itᵀ takes as many operations for all i as the batch's own gradient. Where it is large, writing it and
reading it again costs more than they do, so rows of the weight are taken a block at a time: the block's product of one
example and its two sums stay in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

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
    rows = _rows_of_a_block(layer)
    # Processors take whole matrices of a batched product, and so their own share of what follows: one for each of them.
    lanes = math.gcd(rows, layer.out_channels, torch.get_num_threads())
    at_once = workspace.examples_at_once(x[:1].numel() + _patch_elements(layer, x, grad_output))
    totals = workspace.result(layer.weight.shape, x), workspace.result(layer.weight.shape, x)
    for i, (some, grads) in enumerate(zip(torch.split(x, at_once), torch.split(grad_output, at_once), strict=True)):
        each = _patches_of_each(layer, some, grads, lanes, workspace)
        patches = each if rows == layer.out_channels else list(each)
        delta = grads.flatten(2)  # [B, Cout, T]
        for first in range(0, layer.out_channels, rows):
            lane_rows = torch.unflatten(delta[:, first : first + rows], 1, (lanes, -1))
            for total, found in zip(totals, _sums_of_rows(lane_rows, patches, workspace), strict=True):
                result, values = total[first : first + rows], channels_first(layer, found)
                result.copy_(values) if i == 0 else result.add_(values)
    return totals


def _rows_of_a_block(layer: Conv) -> int:
    rows = layer.out_channels
    while rows * layer.weight[0].numel() > BLOCK_ELEMENTS * torch.get_num_threads() and rows > 1:
        rows = (rows + 1) // 2
    return rows


def _patch_elements(layer: Conv, x: Tensor, grad_output: Tensor) -> int:
    return patch_elements(layer, x, grad_output, goes_by_rows(layer, grad_output.shape[2:]))


def _patches_of_each(
    layer: Conv, x: Tensor, grad_output: Tensor, lanes: int, workspace: Workspace
) -> Iterator[Sequence[Tensor]]:
    """Patches of one example after the other, in parts ``[lanes, T, K]``, the same for every lane."""
    positions = grad_output.shape[2:]
    # Patches that a single block reads stay in the cache too.
    is_single = _rows_of_a_block(layer) == layer.out_channels
    few = max(1, BLOCK_ELEMENTS // _patch_elements(layer, x, grad_output)) if is_single else max(1, len(x))
    for pixels in torch.split(padded_pixels(layer, x, workspace), few):
        for parts in pixel_parts(layer, pixels, positions, goes_by_rows(layer, positions), workspace):
            yield parts.unsqueeze(1).expand(-1, lanes, -1, -1).unbind()


def _sums_of_rows(delta: Tensor, patches: Iterable[Sequence[Tensor]], workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² of some rows, ``[parts, rows, K]``; δ is ``[B, lanes, rows / lanes, T]``."""
    sums: list[Tensor] = []
    for one_delta, parts in zip(delta, patches, strict=True):
        if not sums:
            shape = len(parts), delta.shape[1:3].numel(), parts[0].shape[2]
            sums = [workspace.empty(of, shape, delta) for of in ("products", "sums of rows", "squares of rows")]
            product, grad, square = sums[0], sums[1].zero_(), sums[2].zero_()
            matrices = torch.unflatten(product, 1, delta.shape[1:3]).unbind()
        for matrix, part in zip(matrices, parts, strict=True):
            torch.bmm(one_delta, part, out=matrix)
        grad += product
        square.addcmul_(product, product)
    return grad, square
