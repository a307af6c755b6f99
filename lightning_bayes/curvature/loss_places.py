"""Where the values of a loss's graph hold the examples.

Values of B examples have the *layout* ``outer`` if they are ``[outer, B, inner]`` after flattening and splitting: 1 if the
batch comes first, T if T positions come first. A reshape keeps the layout. Operations that move or remove dimensions change
it, and operations that select rows replace it by the examples that are `Counted`:

    selected rows     v[mask].mean()       counts the examples of the selected rows
    single examples   f(v[j])              counts example j

Below, `shape` and `layout` belong to the first input of a node.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.loss_graph import (
    RESHAPES,
    Edge,
    Shape,
    is_in_order,
    name_of,
    saved_dims,
    shape_of,
    signed,
)
from lightning_bayes.curvature.loss_values import Counted, Place
from lightning_bayes.private_torch import saved_by

SELECTING = {"Index", "IndexSelect", "MaskedSelect", "Gather", "Topk", "Select", "Slice", "Unbind"}


def place_after(edge: Edge, shape: Shape, layout: int, batch_size: int, *, can_select: bool = True) -> Place:
    """Where the values at an edge hold the examples; `can_select` says whether nodes may select some of them."""
    node, after = edge[0], shape_of(edge)
    if name_of(node) in RESHAPES:
        return layout
    piece = layout_of_piece(edge, shape, layout, batch_size)
    if piece is not None:
        return piece
    dim = example_dim(shape, layout, batch_size)
    new_dim = None if dim is None else _new_dim(node, dim, len(shape), len(after))
    if can_select and dim is not None and _selects_rows(node, shape, after, dim, new_dim):
        return _selection(edge, shape, layout, batch_size)
    if saved_by(node, "dim") is None and after == (batch_size,):  # the result of a loss function without reduction
        return 1
    if dim is None or new_dim is None or new_dim >= len(after) or after[new_dim] != shape[dim]:
        return None
    return layout // math.prod(shape[:dim]) * math.prod(after[:new_dim])


def example_dim(shape: Shape, layout: int, batch_size: int) -> int | None:
    """The dimension that holds the examples, perhaps together with others; None if a reshape split them."""
    before = 1
    for dim, size in enumerate(shape):
        if layout % before == 0 and before * size % (layout * batch_size) == 0:
            return dim
        before *= size
    return None


def layout_of_piece(edge: Edge, shape: Shape, layout: int, batch_size: int) -> int | None:
    """The layout of a piece that holds every example, such as half of ``torch.cat([x1, x2])``; None for other nodes."""
    node, output = edge
    dim = example_dim(shape, layout, batch_size)
    if name_of(node) not in {"Slice", "Split"} or dim is None or saved_dims(node, len(shape)) != {dim}:
        return None
    before, size = math.prod(shape[:dim]), shape_of(edge)[dim]
    rows = shape[dim] * before // layout  # rows of this dimension that hold every example once
    start = signed(saved_by(node, "start")) if name_of(node) == "Slice" else output * shape_of((node, 0))[dim]
    is_piece = size < shape[dim] and size % rows == 0 and start % rows == 0
    return before * (size // rows) if is_piece else None


def marked_examples(marks: Tensor, layout: int, batch_size: int) -> Tensor:
    """Mask of the examples with a marked value, ``[B]``, from marks on values with this layout."""
    return marks.reshape(layout, batch_size, -1).any(2).any(0).cpu()


def single_example(edge: Edge, shape: Shape, layout: int, batch_size: int) -> int | None:
    """Index of the example that ``v[j]``, ``v[j:j+1]`` or a loop over v selects; None for other nodes."""
    node, output = edge
    dim, name = example_dim(shape, layout, batch_size), name_of(node)
    if dim is None or shape[dim] != batch_size or saved_dims(node, len(shape)) != {dim}:
        return None
    if name == "Unbind":
        return output
    if name == "Select" or (name == "Slice" and shape_of(edge)[dim] == 1):
        return int(signed(saved_by(node, "index" if name == "Select" else "start")) % batch_size)
    return None


def _selects_rows(node: Any, shape: Shape, after: Shape, dim: int, new_dim: int | None) -> bool:
    """Whether a node selects some rows of the dimension with the examples, which it moves to `new_dim`."""
    name = name_of(node)
    if name == "MaskedSelect":
        return True
    if name == "Index":
        return _indexes_rows(saved_by(node, "indices"), shape, dim)
    is_cut = new_dim is not None and len(after) == len(shape) and after[new_dim] != shape[dim]
    return is_cut or (name in SELECTING - {"Slice"} and dim in saved_dims(node, len(shape)))


def _indexes_rows(indices: Any, shape: Shape, dim: int) -> bool:
    """Whether ``v[indices]`` changes the rows of this dimension. Selecting all rows in order does not."""
    index = indices[dim] if dim < len(indices) else None
    if index is None:
        return any(other is not None and other.dtype == torch.bool for other in indices[: dim + 1])
    return dim > 0 or index.numel() != shape[dim] or not is_in_order(index)


def _selection(edge: Edge, shape: Shape, layout: int, batch_size: int) -> Counted:
    """The examples from which a node selects values."""
    node, after = edge[0], shape_of(edge)
    name = name_of(node)
    if name == "MaskedSelect":
        mask = saved_by(node, "mask")
        indices, num_selected = [mask.expand(shape)], int(mask.sum())
    elif name == "Index":
        indices = [slice(None) if index is None else index for index in saved_by(node, "indices")]
        num_selected = after[0] if after else 1
    elif name == "IndexSelect":
        dim = signed(saved_by(node, "dim")) % len(shape)
        indices, num_selected = [*(slice(None) for _ in range(dim)), saved_by(node, "index")], after[dim]
    else:
        return Counted()
    covered = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in indices)
    num_dims = max(covered, (example_dim(shape, layout, batch_size) or 0) + 1)
    device = next(i.device for i in indices if isinstance(i, Tensor))
    marks = torch.zeros(shape[:num_dims], dtype=torch.bool, device=device)
    marks[tuple(indices)] = True
    is_known = marks.numel() % (layout * batch_size) == 0
    return Counted(marked_examples(marks, layout, batch_size) if is_known else None, (float(num_selected),))


def _new_dim(node: Any, dim: int, rank: int, new_rank: int) -> int | None:
    """Where a node moves a dimension of its input; None if it removes the dimension."""
    name = name_of(node)
    if name == "Transpose":
        swapped = [signed(d) % rank for d in (saved_by(node, "dim0"), saved_by(node, "dim1"))]
        return sum(swapped) - dim if dim in swapped else dim
    if name == "Permute":
        return [signed(d) % rank for d in saved_by(node, "dims")].index(dim)
    if name == "T":
        return rank - 1 - dim
    if name == "Stack":
        return dim + (signed(saved_by(node, "dim")) % new_rank <= dim)
    if name == "Index":
        return dim
    if new_rank >= rank:  # broadcasting adds dimensions in front
        return dim + new_rank - rank
    removed = saved_dims(node, rank)
    return None if dim in removed else dim - sum(other < dim for other in removed)
