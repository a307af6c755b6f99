"""Buffers that the rules reuse for all layers and steps.

The operating system maps a new large buffer page by page on the first write, which costs more than the arithmetic on it. And
the per-example gradients of a whole batch may not fit into memory. So the rules process a few examples at a time. The
workspace provides the buffers and determines the number of examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError

DEFAULT_MIB = 64.0
MIN_REUSED_ELEMENTS = 2**14  # smaller tensors come from memory that the allocator has mapped already


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
        self._results: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}
        self._lent: Counter[tuple[int, torch.dtype, torch.device]] = Counter()

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

    def result(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor for a result; reuses the memory of a returned result if possible."""
        key = (torch.Size(shape).numel(), like.dtype, like.device)
        returned = self._results.get(key)
        self._lent[key] += 1
        return returned.pop().view(shape) if returned else like.new_empty(shape)

    def give_back(self, results: Iterable[Tensor]) -> None:
        """Take back results for reuse, at most as many as `result` lent: more would accumulate over the steps."""
        for tensor in results:
            key = (tensor.numel(), tensor.dtype, tensor.device)
            if self._lent[key] and tensor.is_contiguous() and tensor.numel() >= MIN_REUSED_ELEMENTS:
                self._results.setdefault(key, []).append(tensor)
                self._lent[key] -= 1

    def release(self) -> None:
        """Free all buffers and returned results."""
        self._buffers.clear()
        self._results.clear()
