"""Constants that weigh, mask or select the values of single examples.

    masked mean       Σ w v / Σ w          counts the examples with a nonzero weight
    selected rows     v[mask].mean()       counts the examples of the selected rows
    single examples   f(v[j])              counts example j

The weights are tracked while the loss is linear in the values, to recognise the sum of the weights as a divisor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_graph import Shape, name_of, signed
from lightning_bayes.curvature.loss_values import Weights
from lightning_bayes.private_torch import saved_by

_UNKNOWN = Weights()


def weights_after(node: Any, weights: Weights | None, shape: Shape) -> Weights | None:
    """The weights of the output of a node that reduces nothing, given its only input's weights and shape."""
    after, name = graph.shape_of((node, 0)), name_of(node)
    if graph.has_weights(node):
        return _weighted(weights, _factors(node), after)
    if weights is None or weights.values is None:
        return weights
    if name in graph.RESHAPES:
        return Weights(weights.values.reshape(after), weights.repeats)
    if name == "Permute":
        return Weights(weights.values.permute([signed(dim) for dim in saved_by(node, "dims")]), weights.repeats)
    if name == "Transpose":
        dims = signed(saved_by(node, "dim0")), signed(saved_by(node, "dim1"))
        return Weights(weights.values.transpose(*dims), weights.repeats)
    is_rescaled = name == "Neg" or (name in {"Mul", "Div"} and bool(graph.saved_numbers(node)))
    return weights if is_rescaled and after == shape else _UNKNOWN


def _weighted(weights: Weights | None, factors: Tensor | None, shape: Shape) -> Weights:
    """The product of weights and constant factors, for values of this shape."""
    if factors is None or factors.numel() > math.prod(shape):
        return _UNKNOWN
    repeats = math.prod(shape) // max(factors.numel(), 1)
    if weights is None:
        return Weights(factors.expand(shape), repeats)
    if weights.values is None:
        return _UNKNOWN
    return Weights(weights.values.expand(shape) * factors, max(weights.repeats, repeats))


def _factors(node: Any) -> Tensor | None:
    """The constant factors of a node that `graph.has_weights`; None if unknown."""
    name = name_of(node)
    if name == "MaskedFill":
        is_masked: Tensor = saved_by(node, "mask")
        return (~is_masked).double()
    if name == "Where":
        condition: Tensor = saved_by(node, "condition")
        if None not in graph.edges_of(node):
            return None
        return (condition if node.next_functions[0][0] is not None else ~condition).double()
    tensors = [value for value in graph.saved_constants(node) if isinstance(value, Tensor)]
    return tensors[0].double() if len(tensors) == 1 else None


def weights_of_sums(weights: Weights | None, dims: set[int], kind: str, after: Shape) -> Weights | None:
    """The weights of sums or means over some dimensions of weighted values."""
    if weights is None or weights.values is None:
        return weights
    total = weights.values.sum(sorted(dims)) if kind == "sum" else weights.values.mean(sorted(dims))
    return Weights(total.reshape(after), weights.repeats)


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
