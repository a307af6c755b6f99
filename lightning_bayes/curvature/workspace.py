"""Memory that the rules reuse from layer to layer and from step to step.

A fresh buffer of this size is mapped page by page when it is first written, which costs more than the arithmetic on it;
and per-example gradients of a whole batch would not fit at all. So rules take examples a few at a time, and a workspace
says how many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError

DEFAULT_MIB = 64.0
MIN_REUSED_ELEMENTS = 2**14  # smaller ones come from the allocator's own store, already mapped


class Workspace:
    """Buffers of bounded size, one for each purpose.

    Args:
        limit_mib: Memory in MiB (float32) that a rule may fill at once with values of single examples. A rule takes at
            least one example at a time, however large.

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
        """How many examples of `elements_per_example` elements fit; at least one."""
        return max(1, self.elements // max(1, elements_per_example))

    def split(self, elements_per_example: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Tensors in parts of as many examples as fit, see `examples_at_once`.

        Args:
            elements_per_example: Elements that one example takes.
            *tensors: With the examples in dimension 0.

        Returns:
            The same examples of every tensor, part by part.
        """
        size = self.examples_at_once(elements_per_example)
        return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)

    def empty(self, purpose: str, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """A contiguous tensor with arbitrary content, which lives until the same purpose is asked for again.

        Args:
            purpose: Name of the buffer.
            shape: Shape.
            like: Gives dtype and device.

        Returns:
            The tensor.
        """
        size = torch.Size(shape).numel()
        key = (purpose, like.dtype, like.device)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._buffers[key][:size].view(shape)

    def result(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
        """A contiguous tensor with arbitrary content for a result; one that was given back if there is one.

        Args:
            shape: Shape.
            like: Gives dtype and device.

        Returns:
            The tensor; there is no other reference to it.
        """
        key = (torch.Size(shape).numel(), like.dtype, like.device)
        known = self._results.get(key)
        self._lent[key] += 1
        return known.pop().view(shape) if known else like.new_empty(shape)

    def give_back(self, results: Iterable[Tensor]) -> None:
        """Take results for reuse, no more than were lent: others would pile up from step to step.

        Args:
            results: Tensors that are no longer needed.
        """
        for tensor in results:
            key = (tensor.numel(), tensor.dtype, tensor.device)
            if self._lent[key] and tensor.is_contiguous() and tensor.numel() >= MIN_REUSED_ELEMENTS:
                self._results.setdefault(key, []).append(tensor)
                self._lent[key] -= 1

    def release(self) -> None:
        """Free the buffers and the results that were given back."""
        self._buffers.clear()
        self._results.clear()
