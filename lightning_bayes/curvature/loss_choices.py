"""Constants that weigh, mask and choose among the values of single examples.

    masked mean       Σ w v / Σ w          counts the examples with a weight that is not zero
    chosen rows       v[mask].mean()       counts the examples of the chosen rows
    single examples   f(v[j])              counts example j

Weights are followed as far as values stay linear in them, so that the sum that they are divided by can be recognised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_graph import Shape, name_of, signed
from lightning_bayes.private_torch import saved_by

_KEEPING = {"Neg", "Mul", "Div"}  # by a number


@dataclass(frozen=True)
class Weights:
    """Constant factors of values.

    Attributes:
        values: One for each value, in the values' shape.
        repeats: For how many values each of them was given.
    """

    values: Tensor
    repeats: int = 1

    @property
    def totals(self) -> tuple[float, float]:
        """The sum of all factors, counted by value and as they were given."""
        total = float(self.values.sum())
        return total, total / self.repeats


def weighted(node: Any, before: Weights | None, is_weighted: bool, shape: Shape) -> Weights | None:
    """The factors of what a node computes elementwise, or by moving dimensions.

    Args:
        node: A node that reduces nothing.
        before: The factors of its input.
        is_weighted: Whether its input has any.
        shape: The shape of its input.

    Returns:
        The factors; None if they are not known.
    """
    after, name = graph.shape_of((node, 0)), name_of(node)
    if graph.has_weights(node):
        own = _factors(node)
        if own is None or (is_weighted and before is None) or own.numel() > math.prod(after):
            return None
        if before is None:
            return Weights(own.expand(after), math.prod(after) // max(own.numel(), 1))
        return Weights(before.values.expand(after) * own, max(before.repeats, math.prod(after) // max(own.numel(), 1)))
    if before is None:
        return None
    if name in graph.RESHAPES:
        return Weights(before.values.reshape(after), before.repeats)
    if name in {"Transpose", "Permute"}:
        return Weights(_moved(node, before.values), before.repeats)
    is_kept = name in _KEEPING and after == shape and (name == "Neg" or bool(graph.saved_numbers(node)))
    return before if is_kept else None


def summed(weights: Weights | None, dims: set[int], kind: str, after: Shape) -> Weights | None:
    """The factors of sums or means of weighted values over some dimensions."""
    if weights is None:
        return None
    total = weights.values.sum(sorted(dims)) if kind == "sum" else weights.values.mean(sorted(dims))
    return Weights(total.reshape(after), weights.repeats)


def counted_examples(marks: Tensor, layout: int, batch_size: int) -> Tensor:
    """A mask of the examples that have a mark, ``[B]``.

    Args:
        marks: By value, in a shape with this layout.
        layout: The layout of the examples, see `loss_graph`.
        batch_size: B.

    Returns:
        A mask of the examples.
    """
    return marks.reshape(layout, batch_size, -1).any(2).any(0).cpu()


def chosen_examples(node: Any, shape: Shape, layout: int, batch_size: int) -> Tensor | None:
    """The examples of which a node chooses values, ``[B]``.

    Args:
        node: One that `graph.chooses_rows`.
        shape: The shape of its input.
        layout: The layout of its input.
        batch_size: B.

    Returns:
        A mask of the examples; None if they are not known.
    """
    marks, name = torch.zeros(1, dtype=torch.bool), name_of(node)
    if name == "MaskedSelect":
        marks = saved_by(node, "mask").expand(shape)
    elif name == "Index":
        indices = [slice(None) if index is None else index for index in saved_by(node, "indices")]
        covered = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in indices)
        dims = max(covered, (graph.example_dim(shape, layout, batch_size) or 0) + 1)
        device = next(i.device for i in indices if isinstance(i, Tensor))
        marks = torch.zeros(shape[:dims], dtype=torch.bool, device=device)
        marks[tuple(indices)] = True
    elif name == "IndexSelect":
        dim, index = signed(saved_by(node, "dim")) % len(shape), saved_by(node, "index")
        marks = torch.zeros(shape[: dim + 1], dtype=torch.bool, device=index.device).index_fill(dim, index, True)
    else:
        return None
    return counted_examples(marks, layout, batch_size) if marks.numel() % (layout * batch_size) == 0 else None


def num_chosen(node: Any) -> int:
    """How many rows, or values of a mask, a node chooses."""
    name, after = name_of(node), graph.shape_of((node, 0))
    if name == "MaskedSelect":
        return int(saved_by(node, "mask").sum())
    if name == "IndexSelect":
        return after[signed(saved_by(node, "dim")) % len(after)]
    return after[0] if after else 1


def single_example(node: Any, output: int, shape: Shape, layout: int, batch_size: int) -> int | None:
    """The one example that ``v[j]``, ``v[j:j+1]`` or a loop over v takes.

    Args:
        node: The node.
        output: Number of its output.
        shape: The shape of its input.
        layout: The layout of its input.
        batch_size: B.

    Returns:
        Its number; None if there are several, or none.
    """
    dim, name = graph.example_dim(shape, layout, batch_size), name_of(node)
    if name not in {"Select", "Unbind", "Slice"} or dim is None or shape[dim] != batch_size:
        return None
    if signed(saved_by(node, "dim")) % len(shape) != dim:
        return None
    if name == "Select":
        return int(signed(saved_by(node, "index")) % batch_size)
    if name == "Unbind":
        return output
    if name == "Slice" and graph.shape_of((node, 0))[dim] == 1:
        return int(signed(saved_by(node, "start")) % batch_size)
    return None


def _factors(node: Any) -> Tensor | None:
    name = name_of(node)
    if name == "MaskedFill":
        kept: Tensor = ~saved_by(node, "mask")
        return kept.double()
    if name == "Where":
        condition: Tensor = saved_by(node, "condition")
        if None not in graph.edges_of(node):
            return None
        return (condition if node.next_functions[0][0] is not None else ~condition).double()
    found = [value for value in graph.saved_constants(node) if isinstance(value, Tensor)]
    return found[0].double() if len(found) == 1 else None


def _moved(node: Any, values: Tensor) -> Tensor:
    if name_of(node) == "Permute":
        return values.permute([signed(dim) for dim in saved_by(node, "dims")])
    return values.transpose(signed(saved_by(node, "dim0")), signed(saved_by(node, "dim1")))
