"""Σ_i c_i and Σ_i c_i² of large matrices c_i = δ_i v_i, computed example by example in the processors' caches.

The products take as many operations for all i as the batch's own gradient. Where they are large, writing them and reading
them again costs more than that, so rows are taken a block at a time: the block's product of one example and its two sums
stay in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_bayes.curvature.workspace import Workspace

BLOCK_ELEMENTS = 3 * 2**16  # for each processor; 768 KiB of float32, measured with 2 MiB of L2 cache each


def block_of(rows: int, columns: int) -> tuple[int, int]:
    """How much of a matrix is computed at once.

    Processors take whole matrices of a batched product, and so their own share of what follows: one for each of them.

    Args:
        rows: Rows of the matrix.
        columns: Its columns.

    Returns:
        Rows of a block, and lanes: into how many equal matrices any block of that many rows, or what is left, is cut.
    """
    block = rows
    while block * columns > BLOCK_ELEMENTS * torch.get_num_threads() and block > 1:
        block = (block + 1) // 2
    return block, math.gcd(block, rows, torch.get_num_threads())


def sums_of_block(
    delta: Tensor, values: Iterable[Sequence[Tensor]], parts: tuple[int, int], workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² of some rows.

    Args:
        delta: δ, ``[B, lanes, rows / lanes, T]``.
        values: v of each example, in parts ``[lanes, T, K]``, the same for every lane.
        parts: Number of parts, and K.
        workspace: Holds products and sums.

    Returns:
        Both, ``[parts, rows, K]``, until the next call.
    """
    shape = parts[0], delta.shape[1:3].numel(), parts[1]
    product, grad, square = (
        workspace.empty(of, shape, delta) for of in ("products", "sums of rows", "squares of rows")
    )
    grad, square = grad.zero_(), square.zero_()
    matrices = torch.unflatten(product, 1, delta.shape[1:3]).unbind()
    for one_delta, one_values in zip(delta, values, strict=True):
        for matrix, part in zip(matrices, one_values, strict=True):
            torch.bmm(one_delta, part, out=matrix)
        grad += product
        square.addcmul_(product, product)
    return grad, square
