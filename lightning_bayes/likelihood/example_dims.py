"""Which dimension of a tensor holds the examples of a batch, and which of them a selection of its values keeps.

Values of B examples are ``[outer, B, inner]`` after flattening and splitting:

    rows      ``[B, …]``, or ``[k B, …]`` with the k rows of an example after one another
    second    ``[T, B, …]``
    strided   ``[k B, …]`` with example i in the rows i, i + B, i + 2 B, …

Shapes cannot tell the orders apart. `layout_probe` finds the order. An operation that selects, reorders or reduces rows is
applied to the numbers of the examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.private_torch import without_torch_functions

Shape: TypeAlias = tuple[int, ...]
Order: TypeAlias = Literal["rows", "second", "strided"]
ORDERS: tuple[Order, ...] = ("rows", "second", "strided")
# "piece": a slice of several rows of each example, such as half of ``torch.cat([x1, x2])``, if B rows of it are the examples
Kept: TypeAlias = Literal["all", "permuted", "piece", "some"]


def example_dim(
    shape: Shape, batch_size: int | None, order: Order = "rows", *, preferred: int = 0, classes: int | None = None
) -> int | None:
    """The dimension that holds the examples, perhaps with several rows of each; `classes` is a dimension that does not."""
    if not batch_size:
        return preferred if preferred < len(shape) else None
    fitting = [dim for dim, size in enumerate(shape) if size == batch_size and dim != classes]
    has_several = bool(shape) and shape[0] > batch_size and shape[0] % batch_size == 0
    if order == "strided" and has_several:
        return 0
    if order == "second" and 1 in fitting:
        return 1
    if preferred in fitting or not has_several:
        return preferred if preferred in fitting else next(iter(fitting), None)
    return 0


def outer_size(shape: Shape, dim: int, batch_size: int, order: Order) -> int:
    """The size of the dimension before the examples, in values of this shape that are split into ``[outer, B, inner]``."""
    rows = 1 if order == "rows" else shape[dim] // batch_size
    return math.prod(shape[:dim]) * rows


class Selection(NamedTuple):
    """An operation on values of a shape, whose first result consists of some of the values."""

    shape: Shape
    select: Callable[[Tensor], Any]
    device: torch.device
    by_tensor: bool = False  # whether a tensor holds the indices

    @classmethod
    def of(cls, values: Any, select: Callable[[Tensor], Any], by_tensor: bool = False) -> Selection:
        """The operation `select` on a tensor, or on what has the shape and device of one."""
        return cls(tuple(values.shape), select, values.device, by_tensor)

    def kept(self, batch_size: int | None, order: Order = "rows") -> Kept:
        """Which examples it keeps."""
        dim = example_dim(self.shape, batch_size, order)
        if dim is None:
            return "all"
        size = self.shape[dim]
        rows = self._numbers(dim)
        counts = torch.bincount(rows, minlength=size)
        held = counts.nonzero()[:, 0]
        if len(held) == size and bool((counts == counts[:1]).all()):
            in_order = torch.unique_consecutive(rows)[:size].cpu()
            return "all" if torch.equal(in_order, torch.arange(size)) else "permuted"
        is_even = len(held) > 0 and bool((counts[held] == counts[held[0]]).all())
        is_piece = batch_size is not None and size > batch_size and len(held) % batch_size == 0
        return "piece" if is_even and is_piece and not self.by_tensor else "some"

    @property
    def chooses_rows(self) -> bool:
        """Whether a tensor selects entries of dimension 0, other than all of them in order."""
        return self.by_tensor and self.kept(self.shape[0] or None) != "all"

    def _numbers(self, dim: int) -> Tensor:
        """The indices in a dimension of the values that it keeps."""
        with without_torch_functions(), torch.no_grad():
            column = torch.arange(self.shape[dim], device=self.device).view(-1, *(1 for _ in self.shape[dim + 1 :]))
            found = self.select(column.expand(self.shape))
            kept: Tensor = found if isinstance(found, Tensor) else next(iter(found))
            for other, stride in enumerate(kept.stride()):  # a slice is a view, which costs no memory
                kept = kept if stride else kept.narrow(other, 0, min(1, kept.shape[other]))
            return kept.flatten()
