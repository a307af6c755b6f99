"""Values that are selected from others, as indices: whether a selection keeps every example of a batch."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.curvature.example_dims import Order, Shape, example_dim

# "piece": a slice of several rows of each example, such as half of ``torch.cat([x1, x2])``, if B rows of it are the examples
Choice: TypeAlias = Literal["all", "permuted", "piece", "some"]


def chosen(shape: Shape, index: Any, batch_size: int | None, order: Order = "rows") -> Choice:
    """Which rows an index selects from values of this shape."""
    dim = example_dim(shape, batch_size, order)
    rows = slice(None) if dim is None else _index_at(dim, index, len(shape))
    size = 0 if dim is None else shape[dim]
    if isinstance(rows, slice):
        count = len(range(*rows.indices(size)))
        is_piece = batch_size is not None and size > batch_size and 0 < count < size and count % batch_size == 0
        return "all" if count == size else "piece" if is_piece else "some"
    if isinstance(rows, int):
        return "some"
    rows = torch.as_tensor(rows)
    if rows.dtype == torch.bool:
        return "all" if bool(rows.all()) else "some"
    flat, everything = rows.flatten().cpu(), torch.arange(size, dtype=rows.dtype)
    if torch.equal(flat, everything):
        return "all"
    return "permuted" if torch.equal(flat.sort().values, everything) else "some"


def selects_rows(shape: Shape, index: Any) -> bool:
    """Whether a tensor selects entries of dimension 0, other than all of them in order."""
    rows = _index_at(0, index, len(shape))
    return isinstance(rows, (Tensor, list)) and chosen(shape, index, shape[0] or None) != "all"


def _index_at(dim: int, index: Any, rank: int) -> Any:
    """What an index says about one dimension."""
    items = index if isinstance(index, tuple) else (index,)
    covered = [_num_covered(item) for item in items]
    before = 0
    for item, num_dims in zip(items, covered, strict=True):
        num_dims = rank - sum(covered) if item is ... else num_dims
        if before <= dim < before + num_dims:
            return slice(None) if item is ... else item
        before += num_dims
    return slice(None)


def _num_covered(item: Any) -> int:
    """Number of dimensions that one item of an index covers; 0 for an ellipsis."""
    if item is None or item is ...:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def at(dim: int, index: Any) -> tuple[Any, ...]:
    """The index that selects from one dimension."""
    return (*(slice(None) for _ in range(dim)), index)


def getitem(value: Tensor, input: Tensor, index: Any) -> Any:
    """The index of ``input[index]``, or of a mask."""
    return index


def select(value: Tensor, input: Tensor, dim: int = 0, index: Any = 0, *args: Any, **kwargs: Any) -> Any:
    """The index of one entry or of several entries of a dimension."""
    return at(dim % input.dim(), index)


def narrow(value: Tensor, input: Tensor, dim: int, start: int, length: int) -> Any:
    """The index of `torch.narrow`."""
    return at(dim % input.dim(), slice(int(start), int(start) + length))


def split(value: Tensor, input: Tensor, size: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    """The index of the first piece of a split."""
    return at(dim % input.dim(), slice(0, value.shape[dim]))


def topk(value: Tensor, input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    """An index of as many values as `torch.topk` selects."""
    return at(dim % input.dim(), slice(0, k))


def flip(value: Tensor, input: Tensor, *dims: Any, **kwargs: Any) -> Any:
    """The order in which `torch.flip` takes the entries of each dimension."""
    given = kwargs.get("dims", dims[0] if dims and isinstance(dims[0], (tuple, list)) else dims)
    flipped = {dim % input.dim() for dim in ([given] if isinstance(given, int) else given)}
    return tuple(torch.arange(size - 1, -1, -1) if d in flipped else slice(None) for d, size in enumerate(input.shape))


def roll(value: Tensor, input: Tensor, shifts: Any, dims: Any = ()) -> Any:
    """The order in which `torch.roll` takes the entries of each dimension; one entry if it rolls all of them as one."""
    pairs = list(zip(*([x] if isinstance(x, int) else x for x in (shifts, dims)), strict=False))
    index: list[Any] = [slice(None) for _ in input.shape] if pairs else [0 for _ in input.shape]
    for shift, dim in pairs:
        index[dim] = torch.arange(input.shape[dim]).roll(shift)
    return tuple(index)


def over(value: Tensor, input: Tensor, *args: Any, dim: Any = None, **kwargs: Any) -> Any:
    """The index of one entry of each dimension that a reduction such as a variance removes."""
    dims = dim if dim is not None else next((arg for arg in args if isinstance(arg, (int, tuple, list))), None)
    if dims is None or isinstance(dims, bool):
        return (0,) * input.dim()
    removed = {d % input.dim() for d in ([dims] if isinstance(dims, int) else dims)}
    return tuple(0 if d in removed else slice(None) for d in range(input.dim()))
