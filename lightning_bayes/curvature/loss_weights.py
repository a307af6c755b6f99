"""Constants that weigh or mask the values of the examples. A masked mean Σ w v / Σ w counts those with a nonzero weight.

The weights w are the derivative of the sum with respect to the values v: the linear operations between them run backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_graph import Edge, Shape, name_of
from lightning_bayes.curvature.loss_values import UNSCALED, Examples, Part, Scales
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
        grads = _backward(node, weights, graph.shape_of(edge))
        grad: Tensor = grads[graph.edges_of(node).index(edge)] if isinstance(grads, tuple) else grads
        weights = grad.sum_to_size(graph.shape_of(edge))
    are_mask = all(map(_is_mask, factors))
    return Weights(weights.double() / (scale_of(nodes) or 1), repeats, are_mask)


def _backward(node: Any, weights: Tensor, shape: Shape) -> Any:
    """The backward of a linear node in double precision, in which some of torch's own do not run."""
    name = name_of(node)
    if name == "ToCopy":
        return weights
    if name == "Index":
        return torch.ops.aten.index_put(weights.new_zeros(shape), saved_by(node, "indices"), weights, True)
    if name == "MaskedSelect":
        return weights.new_zeros(shape).masked_scatter(saved_by(node, "mask"), weights)
    return node(weights)


def _is_mask(factors: Tensor | None) -> bool:
    return factors is None or factors.dtype == torch.bool or bool(((factors == 0) | (factors == 1)).all())


def scales_after(node: Any, inputs: Iterable[Examples | Part]) -> Scales:
    """The scales of the values that a node computes from others."""
    if not graph.is_linear(node):
        return UNSCALED
    factor = scale_of([node])
    return frozenset(factor * scale for values in inputs for scale in values.scales)


def scale_of(nodes: Iterable[Any]) -> float:
    """The product of the numbers by which linear nodes multiply all values."""
    scale: float = 1
    for node in nodes:
        for saved in graph.saved_numbers(node):
            number = saved.item() if isinstance(saved, Tensor) else saved
            scale *= 1 / (number or math.inf) if name_of(node) == "Div" else number
    return scale
