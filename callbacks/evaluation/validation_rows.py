"""Some rows of a validation set, spread over it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_bayes.likelihood.batches import is_pair
from lightning_bayes.likelihood.paths import leaves
from lightning_bayes.private_torch import tree_flatten, tree_unflatten

MOST_ROWS = 2000  # that are kept, in memory of the CPU


@final
class KeptRows:
    """Rows of the newest validation of a fit, as its steps got them: nothing is loaded a second time."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.other: str | None = None  # the type of a batch whose rows are not known
        self._count: float = 0

    def start(self, count: float) -> None:
        """Forget the rows of an earlier validation; this one has `count` batches, which may be infinite."""
        self.batches, self.other, self._count = [], None, count

    def add(self, batch: Any, index: int) -> None:
        """Copy some rows of a batch."""
        rows = rows_of(batch)
        if not rows:
            self.other = self.other or type(batch).__name__
        elif math.isfinite(self._count) and index % max(1, self._count // MOST_ROWS) == 0:
            stride = max(1, rows // max(1, math.ceil(MOST_ROWS / self._count)))
            self.batches.append(_copied(_every(batch, stride)))
        elif math.isinf(self._count) and sum(map(rows_of, self.batches)) < MOST_ROWS:
            self.batches.append(_copied(batch))


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


def merged(batches: list[Any], size: int) -> list[Any]:
    """The same examples in batches of `size` rows, if all tensors hold the rows and fit together; else unchanged."""
    parts = [tree_flatten(batch) for batch in batches]
    if any(spec != parts[0][1] for _, spec in parts):
        return batches
    columns = list(zip(*(leaves for leaves, _ in parts), strict=True))
    if not all(_fit_together(column, batches) for column in columns):
        return batches
    whole = [torch.cat(column) for column in columns]
    starts = range(0, sum(map(rows_of, batches)), size)
    return [tree_unflatten([column[i : i + size] for column in whole], parts[0][1]) for i in starts]


def _fit_together(column: tuple[Any, ...], batches: list[Any]) -> bool:
    """Whether a leaf of every batch is a tensor with its rows, of one shape and type."""
    if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in column):
        return False
    of_rows = all(len(leaf) == rows_of(batch) for leaf, batch in zip(column, batches, strict=True))
    return of_rows and len({(leaf.shape[1:], leaf.dtype) for leaf in column}) == 1


def rows_of(batch: Any) -> int:
    """The number of examples: targets of a pair, or the first dimension that all tensors of a batch share; 0 for others."""
    if is_pair(batch):
        return len(batch[1]) if batch[1].dim() else 0
    found = [leaf for _, leaf in leaves(batch)]
    sizes = {len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in found}
    return sizes.pop() if len(sizes) == 1 else 0


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


def _copied(batch: Any) -> Any:
    """A copy in memory of the CPU, which may be changed in place outside of inference mode."""
    with torch.inference_mode(False):
        return apply_to_collection(batch, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
