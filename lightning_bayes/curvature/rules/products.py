"""Σ_i c_i² of large matrices c_i = δ_i v_i, computed example by example in the CPU caches.

All products together take as many operations as the batch gradient. For large matrices, writing and rereading the products
costs more than computing them. So rows are processed in blocks: the product of one example and the sum of a block stay in
the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_bayes.curvature.workspace import Workspace

BLOCK_ELEMENTS = 3 * 2**16  # per core: 768 KiB of float32, tuned on cores with 2 MiB of L2 cache


def squares_by_blocks(
    delta: Tensor, values: Iterable[Tensor], total: Tensor, workspace: Workspace, accumulate: bool = False
) -> None:
    """Write Σ_i c_i² to `total`, or add them with `accumulate`."""
    num_rows, columns = delta.shape[1], total[0].numel()
    rows, lanes = _block_of(num_rows, columns)
    examples = values if rows == num_rows else list(values)
    for first in range(0, num_rows, rows):
        block = torch.unflatten(delta[:, first : first + rows], 1, (lanes, -1))
        target = total[first : first + rows]
        square = _squares_of_block(block, examples, columns, workspace).view(target.shape)
        target.add_(square) if accumulate else target.copy_(square)


def is_single_block(rows: int, columns: int) -> bool:
    """Whether a matrix of this size is one block."""
    return _block_of(rows, columns)[0] == rows


def _block_of(rows: int, columns: int) -> tuple[int, int]:
    """Rows per block, and lanes that divide every block of a matrix, including a shorter last one."""
    block = rows
    while block * columns > BLOCK_ELEMENTS * torch.get_num_threads() and block > 1:
        block = (block + 1) // 2
    # Each core computes whole matrices of a batched product, so a block has one lane per core.
    return block, math.gcd(block, rows, torch.get_num_threads())


def _squares_of_block(delta: Tensor, examples: Iterable[Tensor], columns: int, workspace: Workspace) -> Tensor:
    """Σ_i c_i² ``[rows, K]`` of a block, given δ ``[B, lanes, rows / lanes, T]`` and v of each example, ``[T, K]``."""
    shape = delta.shape[1:3].numel(), columns
    product = workspace.empty("products", shape, delta)
    square = workspace.empty("squares of rows", shape, delta).zero_()
    lanes = torch.unflatten(product, 0, delta.shape[1:3])
    for example_delta, example in zip(delta, examples, strict=True):
        torch.bmm(example_delta, example.expand(len(lanes), -1, -1), out=lanes)
        square.addcmul_(product, product)
    return square
