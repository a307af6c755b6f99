"""Elementwise arithmetic over many tensors, in blocks that fit into the processor's cache.

Processing one tensor at a time costs a small model a kernel launch per tensor and operation, and a large model a round trip
to main memory per operation. Small tensors are therefore concatenated into one block, and large ones are split. Accelerators
get large blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CACHED_ELEMENTS = 2**16  # per core: 256 KiB in float32, times the handful of tensors that an update reads and writes
ACCELERATOR_ELEMENTS = 2**26


class Block(NamedTuple):
    """Whole tensors `first` to `last` - 1, or elements `start` to `stop` - 1 of a single tensor."""

    first: int
    last: int
    start: int
    stop: int

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The elements of the block, flat: a view of a single contiguous tensor, otherwise a copy."""
        if self._is_one_tensor:
            return tensors[self.first].detach().reshape(-1)[self.start : self.stop]
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors[self.first : self.last]])

    def write_(self, tensors: Sequence[Tensor], flat: Tensor) -> None:
        """Write flat elements back; the inverse of `join`. A view that was changed in place needs no copy."""
        if self._is_one_tensor and tensors[self.first].is_contiguous():
            target = self.join(tensors)
            if target.data_ptr() != flat.data_ptr():
                target.copy_(flat)
            return
        targets = list(tensors[self.first : self.last])
        parts = torch.split(flat, [tensor.numel() for tensor in targets])
        torch._foreach_copy_(targets, [part.view(t.shape) for part, t in zip(parts, targets, strict=True)])

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The elements of the block by tensor: whole tensors in their shape, or a flat piece of a large one."""
        if self._is_one_tensor and self.stop - self.start < tensors[self.first].numel():
            return [self.join(tensors)]
        return [tensor.detach() for tensor in tensors[self.first : self.last]]

    @property
    def _is_one_tensor(self) -> bool:
        return self.last - self.first == 1


def blocks(tensors: Sequence[Tensor]) -> Iterator[Block]:
    """Cover tensors of one device and dtype with blocks, in order.

    Args:
        tensors: The tensors. The blocks also apply to other tensors with the same shapes and memory layouts.

    Yields:
        The blocks.
    """
    first = joined = 0
    for i, tensor in enumerate(tensors):
        limit = CACHED_ELEMENTS * torch.get_num_threads() if tensor.is_cpu else ACCELERATOR_ELEMENTS
        if joined and joined + tensor.numel() > limit:
            yield Block(first, i, 0, joined)
            first, joined = i, 0
        if tensor.numel() > limit:
            yield from _cut(i, tensor, limit)
            first = i + 1
        else:
            joined += tensor.numel()
    if first < len(tensors):
        yield Block(first, len(tensors), 0, joined)


def _cut(index: int, tensor: Tensor, limit: int) -> Iterator[Block]:
    step = limit if tensor.is_contiguous() else tensor.numel()  # other layouts have no flat view to split
    for start in range(0, tensor.numel(), step):
        yield Block(index, index + 1, start, min(start + step, tensor.numel()))
