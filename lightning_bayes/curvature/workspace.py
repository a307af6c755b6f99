"""Buffers that the rules reuse for all layers and steps.

The operating system maps a new large buffer page by page on the first write, which costs more than the arithmetic on it. And
the per-example gradients of a whole batch may not fit into memory. So the rules process a few examples at a time. The
workspace provides the buffers and determines the number of examples.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError

DEFAULT_MIB = 64.0


class Workspace:
    """Buffers of limited size, one per purpose.

    Args:
        limit_mib: Memory limit in MiB (of float32) for per-example values. A rule processes at least one example at a
            time, which may exceed the limit.

    Raises:
        HyperparameterError: If the limit is not positive.
    """

    def __init__(self, limit_mib: float = DEFAULT_MIB) -> None:
        if not limit_mib > 0:
            raise HyperparameterError(f"workspace_mib={limit_mib!r} must be above 0.")
        self.elements = int(limit_mib * 2**20 / 4)
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def examples_at_once(self, elements_per_example: int) -> int:
        """Number of examples of this many elements that fit; at least one."""
        return max(1, self.elements // max(1, elements_per_example))

    def split(self, elements_per_example: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Split tensors into chunks of as many examples (dimension 0) as fit; yields tuples of chunks."""
        size = self.examples_at_once(elements_per_example)
        return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)

    def empty(self, purpose: str, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor with the dtype and device of `like`, valid until the purpose's next call."""
        size = torch.Size(shape).numel()
        key = (purpose, like.dtype, like.device)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._buffers[key][:size].view(shape)

    def release(self) -> None:
        """Free all buffers."""
        self._buffers.clear()
