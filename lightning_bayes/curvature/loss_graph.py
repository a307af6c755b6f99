"""Nodes of a loss's autograd graph: names, shapes, order, and where the examples lie in what a node holds.

Values of B examples that lie flat as ``[outer, B, rest]`` have the *layout* ``outer``. A reshape keeps it, whatever the
shapes: batch first is 1, time first is T, flattened or not. Only what moves, removes or selects dimensions changes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.curvature.parameter_uses import is_measured
from lightning_bayes.private_torch import DDP_SINK, output_shapes, saved_by

Edge: TypeAlias = tuple[Any, int]  # a node, and which of its outputs
Shape: TypeAlias = tuple[int, ...]

# Operations as autograd names them. One that is renamed is read as an unknown operation, which asks instead of guessing.
RESHAPES = {
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Clone",
    "ToCopy",
    "BackwardHookFunction",
}
LAYERS = ("Addmm", "Mm", "Bmm", "Convolution", "Embedding", "NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm")
BESIDE, DECLARED = "LossBesideExamples", "DeclaredExamples"  # see `per_example_loss`
_CHOOSING = {"Gather", "IndexSelect", "Topk", "Select", "Unbind"}


def name_of(node: Any) -> str:
    """The operation as torch calls it: ``"MseLoss"``."""
    return str(node.name().rpartition("Backward")[0])


def root_of(loss: Tensor) -> Any:
    """The node of a loss; None if it has no graph."""
    edge = None if loss.grad_fn is None else _behind_ddp((loss.grad_fn, loss.output_nr))
    return None if edge is None else edge[0]


def behind(node: Any) -> Any:
    """The node that computed the first argument of `node`; None for a constant."""
    edge = edges_of(node)[0]
    return None if edge is None else edge[0]


def is_layer(node: Any) -> bool:
    """Whether `node` is the output of a measured layer; hooks behind a module that returns the loss are none."""
    return is_measured(node) and not (name_of(node) in RESHAPES and is_number((node, 0)))


def is_leaf(node: Any) -> bool:
    """Whether `node` stands for a parameter."""
    return hasattr(node, "variable")


def shape_of(edge: Edge) -> Shape:
    """Shape of the tensor at an edge."""
    node, output = edge
    return output_shapes(node)[output]


def edges_of(node: Any) -> list[Edge | None]:
    """The nodes that computed the arguments of `node`, in order; None for constants."""
    return [None if child is None else _behind_ddp((child, output)) for child, output in node.next_functions]


def _behind_ddp(edge: Edge) -> Edge | None:
    """DDP passes all outputs of a step through one identity; losses of examples stand beside a loss by another."""
    node, output = edge
    if name_of(node) == BESIDE:
        behind_it = edges_of(node)[0]
        return edge if behind_it is None else behind_it
    if name_of(node) != DDP_SINK:
        return edge
    return edges_of(node)[output - len(output_shapes(node))]


def in_order(root: Any, is_measured_graph: bool) -> Iterator[Any]:
    """Yield every node between layers and `root`, each after those it was computed from."""
    stack, seen = [(root, False)], set()
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if (
                not is_layer(node)
                and name_of(node) != DECLARED
                and (is_measured_graph or not name_of(node).startswith(LAYERS))
            ):
                stack += [(edge[0], False) for edge in edges_of(node) if edge is not None]


def is_number(edge: Edge) -> bool:
    """Whether the tensor at an edge holds one value."""
    return math.prod(shape_of(edge)) == 1


def counted_targets(node: Any) -> Tensor | None:
    """A mask of the targets of a loss function that count; None if it knows no targets to ignore."""
    if saved_by(node, "ignore_index") is None:
        return None
    counted: Tensor = saved_by(node, "target") != signed(saved_by(node, "ignore_index"))
    return counted


def saved_numbers(node: Any) -> list[Any]:
    """The numbers that a product or quotient has for constants."""
    return [value for value in saved_constants(node) if not isinstance(value, Tensor) or value.numel() == 1]


def has_weights(node: Any) -> bool:
    """Whether a node weighs or masks its values by constants. A log-softmax has probabilities of the classes for them."""
    if name_of(node) != "Mul":
        return name_of(node) in {"MaskedFill", "Where"}
    is_cross_entropy = any(edge is not None and name_of(edge[0]) == "LogSoftmax" for edge in edges_of(node))
    return len(saved_constants(node)) > len(saved_numbers(node)) and not is_cross_entropy


def saved_constants(node: Any) -> list[Any]:
    """The numbers and tensors that a product or quotient has for constants."""
    if name_of(node) not in {"Mul", "Div"}:
        return []
    constant = [place for place in (0, 1) if place >= len(node.next_functions) or node.next_functions[place][0] is None]
    saved = [saved_by(node, ("self", "other")[place]) for place in constant]
    return [value for value in saved if value is not None]


def signed(dim: int) -> int:
    """A dimension or index as it was given; torch shows -1 as an unsigned number."""
    return dim if dim < 2**63 else dim - 2**64


def saved_dims(node: Any, rank: int) -> set[int]:
    """The dimensions that a node works on; empty if it does not say."""
    dims = saved_by(node, "dim")
    listed = () if dims is None else (dims,) if isinstance(dims, int) else dims
    return {signed(dim) % max(rank, 1) for dim in listed}


def example_dim(shape: Shape, outer: int, batch_size: int) -> int | None:
    """The dimension that holds the examples of a layout, perhaps beside others; None if reshaping tore them apart."""
    before = 1
    for dim, size in enumerate(shape):
        if outer % before == 0 and before * size % (outer * batch_size) == 0:
            return dim
        before *= size
    return None


def chooses_rows(node: Any, shape: Shape, dim: int) -> bool:
    """Whether `node` takes some rows of its input of this shape, whose examples lie in `dim`."""
    name = name_of(node)
    if name == "MaskedSelect":
        return True
    if name == "Index":
        indices = saved_by(node, "indices")
        index = indices[dim] if dim < len(indices) else None
        if index is None:
            return any(other is not None and other.dtype == torch.bool for other in indices[: dim + 1])
        is_all = index.dtype != torch.bool and index.numel() == shape[dim] and dim == 0
        return not (is_all and torch.equal(index.flatten(), torch.arange(shape[dim], device=index.device)))
    after = shape_of((node, 0))
    new = None if name in RESHAPES else _new_dim(node, dim, len(shape), len(after))
    is_cut = new is not None and len(after) == len(shape) and after[new] != shape[dim]
    return is_cut or (name in _CHOOSING and dim in saved_dims(node, len(shape)))


def cut_layout(node: Any, shape: Shape, outer: int, batch_size: int) -> int | None:
    """The layout of a piece that holds all examples, such as one half of ``torch.cat([x1, x2])``; None for another piece.

    Args:
        node: Any node.
        shape: The shape of its input.
        outer: Layout of its input.
        batch_size: B.

    Returns:
        The layout of the piece.
    """
    dim = example_dim(shape, outer, batch_size)
    if name_of(node) not in {"Slice", "Split"} or dim is None or saved_dims(node, len(shape)) != {dim}:
        return None
    before, size = math.prod(shape[:dim]), shape_of((node, 0))[dim]
    once = shape[dim] * before // outer  # rows of this dimension that hold every example once
    start = signed(saved_by(node, "start")) if name_of(node) == "Slice" else 0
    is_whole = size < shape[dim] and size % once == 0 and start % once == 0
    return before * (size // once) if is_whole else None


def moved(node: Any, shape: Shape, outer: int, batch_size: int) -> int | None:
    """The layout of what `node` made of values with layout `outer`; None if the examples can no longer be told apart.

    Args:
        node: Neither a reduction of all dimensions nor one that `chooses_rows`.
        shape: The shape of its input.
        outer: Layout of its input.
        batch_size: B.

    Returns:
        The new layout.
    """
    if name_of(node) in RESHAPES:
        return outer
    dim, after = example_dim(shape, outer, batch_size), shape_of((node, 0))
    if saved_by(node, "dim") is None and after == (batch_size,):  # what a loss function leaves without reduction
        return 1
    new = None if dim is None else _new_dim(node, dim, len(shape), len(after))
    if dim is None or new is None or new >= len(after) or after[new] != shape[dim]:
        return None
    return outer // math.prod(shape[:dim]) * math.prod(after[:new])


def _new_dim(node: Any, dim: int, rank: int, new_rank: int) -> int | None:
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
    if new_rank >= rank:  # new dimensions of a broadcast come first
        return dim + new_rank - rank
    removed = saved_dims(node, rank)
    return None if dim in removed else dim - sum(other < dim for other in removed)
