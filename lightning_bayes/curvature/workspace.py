"""Memory that the rules reuse from layer to layer and from step to step.

A fresh buffer of this size is mapped page by page when it is first written, which costs more than the arithmetic on it;
and per-example gradients of a whole batch would not fit at all. So rules take examples a few at a time, and a workspace
says how many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.errors import HyperparameterError

DEFAULT_MIB = 64.0


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

    def examples_at_once(self, elements_per_example: int) -> int:
        """How many examples of `elements_per_example` elements fit; at least one."""
        return max(1, self.elements // max(1, elements_per_example))

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
