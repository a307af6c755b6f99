"""The rows of the examples in the tensors between layers and loss: what a backward pass from one example keeps.

The record of the loss tells which values it reduces over the examples, or which arguments its loss function has. For a loss
without such a record, the outputs of the last layers hold the examples.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor

from lightning_bayes.curvature.example_dims import Order, example_dim, outer_size
from lightning_bayes.curvature.loss_recorder import LossRecorder
from lightning_bayes.curvature.loss_terms import Edge
from lightning_bayes.curvature.parameter_uses import is_layer
from lightning_bayes.private_torch import output_shapes


class ExampleRows(NamedTuple):
    """Tensors that hold n examples as ``[outer, n, inner]``, after flattening and splitting."""

    num_examples: int  # n
    order: Order
    outer: dict[Edge, int]
    is_recorded: bool  # whether the record tells where the examples are, and no term uses a lone piece of the rows


def example_rows(recorder: LossRecorder, loss: Tensor, num_examples: int, order: Order) -> ExampleRows | None:
    """Where the tensors between layers and loss hold the examples; None if these shapes do not fit."""
    root = loss.grad_fn
    found = recorder.rows(loss, num_examples, order)
    if found is not None and not _first_layers(root, found.outer):
        return ExampleRows(num_examples, order, found.outer, not found.has_lone_pieces)
    outer = {edge: _outer(edge, num_examples, order) for edge in _first_layers(root, ())}
    sizes = {edge: size for edge, size in outer.items() if size is not None}
    return ExampleRows(num_examples, order, sizes, False) if sizes and len(sizes) == len(outer) else None


def _first_layers(root: Any, ends: Collection[Edge]) -> list[Edge]:
    """The outputs of layers that a node depends on, not by way of another layer or of one of the ends."""
    found: list[Edge] = []
    stack: list[Edge] = [(root, 0)]
    seen = set(stack)
    while stack:
        edge = stack.pop()
        if edge in ends:
            continue
        if is_layer(edge[0]):
            found.append(edge)
            continue
        children = [child for child in edge[0].next_functions if child[0] is not None and child not in seen]
        seen.update(children)
        stack += children
    return found


def _outer(edge: Edge, num_examples: int, order: Order) -> int | None:
    shape = output_shapes(edge[0])[edge[1]]
    dim = example_dim(shape, num_examples, order)
    return None if dim is None else outer_size(shape, dim, num_examples, order)
