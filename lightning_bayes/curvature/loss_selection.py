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
from lightning_bayes.curvature.loss_values import Counted
from lightning_bayes.private_torch import saved_by


class Weights(NamedTuple):
    """Constant factors of values, including masks."""

    values: Tensor  # w, one per value, without the `scale_of` all values
    repeats: int  # number of values that share each of the user's factors by broadcasting
    are_mask: bool  # whether the user's factors are all 0 or 1


def weights_of(path: Sequence[Edge]) -> Weights:
    """The weights of the values at the end of a path through linear nodes, of which the first values are the sum."""
    nodes = [node for node, _ in path[:-1]]
    factors = [graph.factors_of(node) for node in nodes]
    device = next(factor.device for factor in factors if factor is not None)
    weights, repeats = torch.ones(graph.shape_of(path[0]), dtype=torch.float64, device=device), 1
    for node, factor, edge in zip(nodes, factors, path[1:], strict=True):
        if factor is not None:
            repeats = max(repeats, weights.numel() // max(factor.numel(), 1))
        grads = weights if name_of(node) == "ToCopy" else node(weights)  # a copy in half precision would round them
        grad: Tensor = grads[graph.edges_of(node).index(edge)] if isinstance(grads, tuple) else grads
        weights = grad.sum_to_size(graph.shape_of(edge))
    are_mask = all(map(_is_mask, factors))
    return Weights(weights.double() / (scale_of(path) or 1), repeats, are_mask)


def _is_mask(factors: Tensor | None) -> bool:
    return factors is None or factors.dtype == torch.bool or bool(((factors == 0) | (factors == 1)).all())


def scale_of(path: Sequence[Edge]) -> float:
    """The product of the numbers by which the linear nodes of a path multiply all values."""
    scale: float = 1
    for node, _ in path[:-1]:
        for saved in graph.saved_numbers(node):
            number = saved.item() if isinstance(saved, Tensor) else saved
            scale *= 1 / (number or math.inf) if name_of(node) == "Div" else number
    return scale


def marked_examples(marks: Tensor, layout: int, batch_size: int) -> Tensor:
    """Mask of the examples with a marked value, ``[B]``, from marks on values with this layout."""
    return marks.reshape(layout, batch_size, -1).any(2).any(0).cpu()


def selection_by(edge: Edge, shape: Shape, layout: int, batch_size: int) -> Counted:
    """The examples from which a node selects values. See `graph.selects_rows`."""
    node, after = edge[0], graph.shape_of(edge)
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
    num_dims = max(covered, (graph.example_dim(shape, layout, batch_size) or 0) + 1)
    device = next(i.device for i in indices if isinstance(i, Tensor))
    marks = torch.zeros(shape[:num_dims], dtype=torch.bool, device=device)
    marks[tuple(indices)] = True
    is_known = marks.numel() % (layout * batch_size) == 0
    return Counted(marked_examples(marks, layout, batch_size) if is_known else None, (float(num_selected),))


def single_example(edge: Edge, shape: Shape, layout: int, batch_size: int) -> int | None:
    """Index of the example that ``v[j]``, ``v[j:j+1]`` or a loop over v selects; None for other nodes."""
    node, output = edge
    dim, name = graph.example_dim(shape, layout, batch_size), name_of(node)
    if name not in {"Select", "Unbind", "Slice"} or dim is None or shape[dim] != batch_size:
        return None
    if signed(saved_by(node, "dim")) % len(shape) != dim:
        return None
    if name == "Select":
        return int(signed(saved_by(node, "index")) % batch_size)
    if name == "Unbind":
        return output
    if graph.shape_of(edge)[dim] == 1:
        return int(signed(saved_by(node, "start")) % batch_size)
    return None
