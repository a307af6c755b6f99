"""Constants that weigh, mask or select the values of the examples.

    masked mean       Σ w v / Σ w          counts the examples with a nonzero weight
    selected rows     v[mask].mean()       counts the examples of the selected rows
    single examples   f(v[j])              counts example j

The weights w are the derivative of the sum with respect to the values v: the linear operations between them run backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_graph import Edge, Shape, name_of, signed
from lightning_bayes.private_torch import saved_by


class Weights(NamedTuple):
    """Constant factors of values, including masks."""

    values: Tensor  # w, one per value, without the `scale_of` all values
    repeats: int  # number of values that share each of the user's factors by broadcasting


def weights_of(path: Sequence[Edge]) -> Weights:
    """The weights of the values at the end of a path through linear nodes, of which the first values are the sum."""
    nodes = [node for node, _ in path[:-1]]
    device = next(factors.device for node in nodes if (factors := graph.factors_of(node)) is not None)
    weights, repeats = torch.ones(graph.shape_of(path[0]), dtype=torch.float64, device=device), 1
    for node, edge in zip(nodes, path[1:], strict=True):
        if (factors := graph.factors_of(node)) is not None:
            repeats = max(repeats, weights.numel() // max(factors.numel(), 1))
        grads = node(weights)
        grad: Tensor = grads[graph.edges_of(node).index(edge)] if isinstance(grads, tuple) else grads
        weights = grad.sum_to_size(graph.shape_of(edge))
    return Weights(weights.double() / (scale_of(path) or 1), repeats)


def scale_of(path: Sequence[Edge]) -> float:
    """The number by which the linear nodes of a path multiply all values that they do not mask."""
    return math.prod(_scale(node) for node, _ in path[:-1])


def _scale(node: Any) -> float:
    for saved in graph.saved_numbers(node):
        number: float = saved.item() if isinstance(saved, Tensor) else saved
        return 1 / (number or math.inf) if name_of(node) == "Div" else number
    factors = graph.factors_of(node) if name_of(node) == "Mul" else None
    if factors is None:
        return 1
    nonzero = factors[factors != 0]
    is_constant = nonzero.numel() > 0 and bool((nonzero == nonzero[0]).all())
    return float(nonzero[0]) if is_constant else 1


def marked_examples(marks: Tensor, layout: int, batch_size: int) -> Tensor:
    """Mask of the examples with a marked value, ``[B]``, from marks on values with this layout."""
    return marks.reshape(layout, batch_size, -1).any(2).any(0).cpu()


def selected_examples(node: Any, shape: Shape, layout: int, batch_size: int) -> Tensor | None:
    """Mask of the examples from which a node selects values, ``[B]``; None if unknown. See `graph.selects_rows`."""
    name = name_of(node)
    if name == "MaskedSelect":
        marks = saved_by(node, "mask").expand(shape)
    elif name == "Index":
        indices = [slice(None) if index is None else index for index in saved_by(node, "indices")]
        covered = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in indices)
        num_dims = max(covered, (graph.example_dim(shape, layout, batch_size) or 0) + 1)
        device = next(i.device for i in indices if isinstance(i, Tensor))
        marks = torch.zeros(shape[:num_dims], dtype=torch.bool, device=device)
        marks[tuple(indices)] = True
    elif name == "IndexSelect":
        dim, index = signed(saved_by(node, "dim")) % len(shape), saved_by(node, "index")
        marks = torch.zeros(shape[: dim + 1], dtype=torch.bool, device=index.device).index_fill(dim, index, True)
    else:
        return None
    return marked_examples(marks, layout, batch_size) if marks.numel() % (layout * batch_size) == 0 else None


def num_selected(node: Any) -> int:
    """Number of rows, or of values of a mask, that a node selects."""
    name, after = name_of(node), graph.shape_of((node, 0))
    if name == "MaskedSelect":
        return int(saved_by(node, "mask").sum())
    if name == "IndexSelect":
        return after[signed(saved_by(node, "dim")) % len(after)]
    return after[0] if after else 1


def single_example(node: Any, output: int, shape: Shape, layout: int, batch_size: int) -> int | None:
    """Index of the example that ``v[j]``, ``v[j:j+1]`` or a loop over v selects; None for other nodes."""
    dim, name = graph.example_dim(shape, layout, batch_size), name_of(node)
    if name not in {"Select", "Unbind", "Slice"} or dim is None or shape[dim] != batch_size:
        return None
    if signed(saved_by(node, "dim")) % len(shape) != dim:
        return None
    if name == "Select":
        return int(signed(saved_by(node, "index")) % batch_size)
    if name == "Unbind":
        return output
    if graph.shape_of((node, 0))[dim] == 1:
        return int(signed(saved_by(node, "start")) % batch_size)
    return None
