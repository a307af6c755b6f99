"""Σ_i c_i and Σ_i c_i² of large matrices c_i = δ_i v_i, computed example by example in the CPU caches.

All products together take as many operations as the batch gradient. For large matrices, writing and rereading the products
costs more than computing them. So rows are processed in blocks: the product of one example and both sums of a block stay in
the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_bayes.curvature.workspace import Workspace

BLOCK_ELEMENTS = 3 * 2**16  # per core: 768 KiB of float32, tuned on cores with 2 MiB of L2 cache


def block_of(rows: int, columns: int) -> tuple[int, int]:
    """Rows per block, and lanes that divide every block of a matrix, including a shorter last one."""
    block = rows
    while block * columns > BLOCK_ELEMENTS * torch.get_num_threads() and block > 1:
        block = (block + 1) // 2
    # Each core computes whole matrices of a batched product, so a block has one lane per core.
    return block, math.gcd(block, rows, torch.get_num_threads())


def sums_of_block(
    delta: Tensor, values: Iterable[Sequence[Tensor]], parts: tuple[int, int], workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """Σ_i c_i and Σ_i c_i² for one block of rows.

    Args:
        delta: δ, ``[B, lanes, rows / lanes, T]``.
        values: v of each example, in parts ``[lanes, T, K]`` that are equal in all lanes.
        parts: Number of parts, and K.
        workspace: Provides the memory of products and sums.

    Returns:
        Both sums, ``[parts, rows, K]``, valid until the next call.
    """
    shape = parts[0], delta.shape[1:3].numel(), parts[1]
    product = workspace.empty("products", shape, delta)
    grad = workspace.empty("sums of rows", shape, delta).zero_()
    square = workspace.empty("squares of rows", shape, delta).zero_()
    matrices = torch.unflatten(product, 1, delta.shape[1:3]).unbind()
    for example_delta, example_values in zip(delta, values, strict=True):
        for matrix, part in zip(matrices, example_values, strict=True):
            torch.bmm(example_delta, part, out=matrix)
        grad += product
        square.addcmul_(product, product)
    return grad, square
