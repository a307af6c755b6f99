"""Which dimension of a tensor holds the examples of a batch, for each order in which it may hold them.

Values of B examples are ``[outer, B, inner]`` after flattening and splitting:

    rows      ``[B, …]``, or ``[k B, …]`` with the k rows of an example after one another
    second    ``[T, B, …]``
    strided   ``[k B, …]`` with example i in the rows i, i + B, i + 2 B, …

Shapes cannot tell the orders apart. `layout_probe` finds the order.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Order: TypeAlias = Literal["rows", "second", "strided"]
ORDERS: tuple[Order, ...] = ("rows", "second", "strided")


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
