"""The autograd graph of a loss: names, shapes and order of its nodes, and the constants that they save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.curvature.parameter_uses import enters_measured_layer, is_measured
from lightning_bayes.private_torch import DDP_SINK, output_shapes, saved_by

Edge: TypeAlias = tuple[Any, int]  # a node and the index of one of its outputs
Shape: TypeAlias = tuple[int, ...]

# Names of autograd's operations. A renamed operation counts as unknown, so the loss is refused, never read wrongly.
RESHAPES = {
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"),
    *("Alias", "Clone", "ToCopy", "BackwardHookFunction"),
}
STACKING = {"Stack", "Cat"}
ADDING = {"Add", "Sub", *STACKING}
REDUCING = {"Mean": "mean", "Sum": "sum", "Nansum": "sum"}
LINEAR = {
    *RESHAPES,
    *REDUCING,
    *("Neg", "Expand", "Transpose", "Permute", "Mv", "Dot", "Mm"),
    *("Select", "Slice", "Index", "IndexSelect", "MaskedSelect"),
}
LAYERS = ("Addmm", "Mm", "Bmm", "Convolution", "Embedding", "NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm")
# Keys in a node's metadata: the per-example losses attached to a loss, and marks of two kinds of nodes.
WITH_EXAMPLES, DECLARED, DIVISION = "with_per_example_loss", "is_per_example_loss", "is_division_by_host"


def name_of(node: Any) -> str:
    """The operation's name in torch, such as ``"MseLoss"``."""
    return str(node.name().rpartition("Backward")[0])


def root_of(loss: Tensor) -> Any:
    """The node of a loss, before the training loop's division if there is one; None if it has no graph."""
    edge = None if loss.grad_fn is None else _skip_identities((loss.grad_fn, loss.output_nr))
    return None if edge is None else edge[0]


def mark_division(loss: Tensor) -> None:
    """Mark the last operation of a loss as the training loop's division, which is no part of the loss."""
    node = last_operation(loss)
    if node is not None:
        metadata_of(node)[DIVISION] = True


def last_operation(loss: Tensor) -> Any:
    """The node of a loss, before the identity that stores per-example losses; None if it has no graph."""
    node: Any = loss.grad_fn
    return node.next_functions[0][0] if node is not None and WITH_EXAMPLES in metadata_of(node) else node


def metadata_of(node: Any) -> dict[str, Any]:
    """What `mark_division` and `per_example_loss` stored on a node."""
    metadata: dict[str, Any] = node.metadata
    return metadata


def is_layer(node: Any) -> bool:
    """Whether `node` is the output of a measured layer. A module that returns the loss has hooks, too, but is no layer."""
    return is_measured(node) and not (name_of(node) in RESHAPES and is_number((node, 0)))


def is_leaf(node: Any) -> bool:
    """Whether `node` accumulates the gradient of a parameter."""
    return hasattr(node, "variable")


def shape_of(edge: Edge) -> Shape:
    """Shape of the tensor at an edge."""
    node, output = edge
    return output_shapes(node)[output]


def is_number(edge: Edge) -> bool:
    """Whether the tensor at an edge has one element."""
    return math.prod(shape_of(edge)) == 1


def edges_of(node: Any) -> list[Edge | None]:
    """The edges to the arguments of `node`, in order; None for constants."""
    return [None if child is None else _skip_identities((child, output)) for child, output in node.next_functions]


def _skip_identities(edge: Edge) -> Edge | None:
    """Skip DDP's identity on all outputs of a step, the one with per-example losses, and the training loop's division."""
    node, output = edge
    if metadata_of(node).keys() & {WITH_EXAMPLES, DIVISION}:
        return edges_of(node)[0]
    return edges_of(node)[output - len(output_shapes(node))] if name_of(node) == DDP_SINK else edge


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """Yield every node from the layers to a loss once, arguments first."""
    root = root_of(loss)
    return iter(()) if root is None else in_order(root, enters_measured_layer(root))


def in_order(root: Any, is_measured_graph: bool) -> Iterator[Any]:
    """Yield every node from the layers to `root` once, arguments first. Unmarked layers are recognised by name."""
    stack, seen = [(root, False)], set()
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            is_end = is_layer(node) or DECLARED in metadata_of(node)
            if not is_end and (is_measured_graph or not name_of(node).startswith(LAYERS)):
                stack += [(edge[0], False) for edge in edges_of(node) if edge is not None]


def counted_targets(node: Any) -> Tensor | None:
    """Mask of the targets of a loss function that are not `ignore_index`; None if it has no `ignore_index`."""
    if saved_by(node, "ignore_index") is None:
        return None
    counted: Tensor = saved_by(node, "target") != signed(saved_by(node, "ignore_index"))
    return counted


def saved_constants(node: Any) -> list[Any]:
    """The constant arguments of a product or quotient."""
    if name_of(node) not in {"Mul", "Div"}:
        return []
    functions = node.next_functions
    constant = [index for index in (0, 1) if index >= len(functions) or functions[index][0] is None]
    saved = [saved_by(node, ("self", "other")[index]) for index in constant]
    return [value for value in saved if value is not None]


def saved_numbers(node: Any) -> list[Any]:
    """The constant arguments of a product or quotient that are numbers."""
    return [value for value in saved_constants(node) if not isinstance(value, Tensor) or value.numel() == 1]


def factors_of(node: Any) -> Tensor | None:
    """The constant factors or the mask of a node; None if it has none. Class probabilities as targets do not count."""
    name = name_of(node)
    if name in {"MaskedFill", "Where"}:
        mask: Tensor = saved_by(node, "mask" if name == "MaskedFill" else "condition")
        return mask
    is_cross_entropy = any(edge is not None and name_of(edge[0]) == "LogSoftmax" for edge in edges_of(node))
    if name != "Mul" or is_cross_entropy:
        return None
    return next((value for value in saved_constants(node) if isinstance(value, Tensor) and value.numel() > 1), None)


def is_linear(node: Any) -> bool:
    """Whether `node` is a sum, or linear in its only argument that is no constant."""
    edges = edges_of(node)
    if name_of(node) in ADDING:
        return True
    if len(edges) - edges.count(None) != 1 or (name_of(node) == "Div" and edges[0] is None):
        return False
    return name_of(node) in LINEAR or bool(saved_numbers(node)) or factors_of(node) is not None


def is_in_order(index: Tensor) -> bool:
    """Whether ``v[index]`` takes the rows 0, 1, 2, … of v."""
    return index.dtype != torch.bool and torch.equal(index.flatten(), torch.arange(index.numel(), device=index.device))


def signed(dim: int) -> int:
    """A dimension or index as the user gave it: autograd shows negative numbers as unsigned ones."""
    return dim if dim < 2**63 else dim - 2**64


def saved_dims(node: Any, rank: int) -> set[int]:
    """The dimensions that a node reduces or selects from; empty if it saves none."""
    dims = saved_by(node, "dim")
    if dims is None:
        return set()
    return {signed(dim) % max(rank, 1) for dim in ((dims,) if isinstance(dims, int) else dims)}
