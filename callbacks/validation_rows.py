"""Some rows of a validation set, spread over it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def thinned(batches: Iterable[Any], count: int | None, rows: int) -> list[Any]:
    """About `rows` examples, spread over the `count` batches; the first ones if `count` is unknown."""
    kept, found = list[Any](), 0
    step = 1 if count is None else max(1, count // rows)
    of_batch = rows if count is None else max(1, -(-rows * step // count))
    for batch in islice(batches, 0, count, step):
        stride = max(1, rows_of(batch) // of_batch)
        kept.append(_every(batch, stride))
        found += rows_of(kept[-1])
        if count is None and found >= rows:
            break
    return kept


def rows_of(batch: Any) -> int:
    """The number of examples of a batch ``(inputs, targets)``; 0 for other batches."""
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)
    return len(batch[1]) if is_pair and batch[1].dim() else 0


def length(loader: Any, limit: int | None) -> int | None:
    """The number of batches to read; None if it is unknown."""
    try:
        batches = len(loader)
    except TypeError:  # of an iterable data set
        return None
    return batches if limit is None else min(batches, limit)


def _every(batch: Any, stride: int) -> Any:
    """Every `stride`-th row of all tensors of a batch that have its rows."""
    rows = rows_of(batch)

    def some(tensor: Tensor) -> Tensor:
        return tensor[::stride] if tensor.dim() and len(tensor) == rows else tensor

    return apply_to_collection(batch, Tensor, some)
