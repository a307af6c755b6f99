"""Backward from the loss of one example, in the graph of the loss of the whole batch.

A loss that `loss_reading` reads is a function of values of single examples. Where these values are cut off by a mask, only
one example's gradient goes on:

    c_i = ∂L/∂v_i · ∂v_i/∂θ        v_i: the values of example i just before they are reduced

BatchNorm in training mode mixes its rows lawfully: a row with gradient keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_reading import LossReader
from lightning_bayes.curvature.loss_values import Values
from lightning_bayes.curvature.parameter_uses import nodes_behind

_BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
_UNREPEATABLE = ("CheckpointFunction", "SyncBatchNorm")  # backward runs once, or in all processes at a time


class SingleExamples:
    """Runs backward from single examples.

    Args:
        loss: The loss, before its own backward, which stays possible.
        reader: The reader of its graph.
    """

    def __init__(self, loss: Tensor, reader: LossReader) -> None:
        self.loss, self.num_examples = loss, reader.batch_size
        self._cuts = _cuts(reader, reader.batch_size)
        self._example: int | None = None

    @property
    def is_possible(self) -> bool:
        """Whether every value of the loss that an example enters can be told from those of the others."""
        return bool(self._cuts)

    @contextmanager
    def apart(self) -> Iterator[Callable[[int | None, Sequence[GradientEdge | Tensor]], list[Tensor | None]]]:
        """Cut the examples off one another.

        Yields:
            A function that returns the gradients of one example's share of the loss by some edges or leaves; of example
            None, of all terms that no example enters.
        """
        handles = [node.register_prehook(self._masked(cuts)) for node, cuts in self._cuts.items()]
        for node in nodes_behind([self.loss.grad_fn]):
            if graph.name_of(node).startswith(_BATCH_NORMS):
                handles.append(node.register_hook(_own_rows))
        try:
            yield self._gradients
        finally:
            for handle in handles:
                handle.remove()

    def of_batch(self, inputs: Sequence[GradientEdge | Tensor]) -> list[Tensor | None]:
        """The gradients of the whole loss by some edges or leaves, outside of `apart`."""
        asked: Any = list(inputs)  # torch takes both kinds at once, its annotation does not
        return list(torch.autograd.grad(self.loss, asked, retain_graph=True, allow_unused=True))

    def _gradients(self, example: int | None, inputs: Sequence[GradientEdge | Tensor]) -> list[Tensor | None]:
        self._example = example
        found = self.of_batch(inputs)
        for place, edge in enumerate(inputs):  # autograd takes what is asked for before the hooks of its node run
            layout = None if isinstance(edge, Tensor) else self._cuts.get(edge.node, {}).get(edge.output_nr)
            grad = found[place]
            if layout is not None and grad is not None:
                found[place] = self._of_example(grad, layout)
        return found

    def _masked(self, layouts: dict[int, int]) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
        def mask(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(
                self._of_example(grad, layouts[place]) if place in layouts and grad is not None else grad
                for place, grad in enumerate(grads)
            )

        return mask

    def _of_example(self, grad: Tensor, outer: int) -> Tensor:
        found = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        if self._example is not None:
            apart = grad.reshape(outer, self.num_examples, -1)
            found.view(outer, self.num_examples, -1)[:, self._example] = apart[:, self._example]
        return found


def can_repeat_backward(loss: Tensor) -> bool:
    """Whether the graph of a loss may be run through more than once, in this process alone."""
    return not any(graph.name_of(node).startswith(_UNREPEATABLE) for node in nodes_behind([loss.grad_fn]))


def _cuts(reader: LossReader, n: int) -> dict[Any, dict[int, int]]:
    """The layout of the values of single examples, by node and number of its output; empty if it is not known."""
    found: dict[Any, dict[int, int]] = {}
    stack: list[tuple[Any, int]] = [(reader.root, 0)]
    seen = set(stack)
    while stack:
        edge = stack.pop()
        values = reader.values_of(edge)
        layout = _layout(values, graph.shape_of(edge), n)
        if layout is not None:
            found.setdefault(edge[0], {})[edge[1]] = layout
        elif graph.is_layer(edge[0]):
            return {}
        elif values is not None:
            children = [child for child in graph.edges_of(edge[0]) if child is not None and child not in seen]
            seen.update(children)
            stack += children
    return found


def _layout(values: Values | None, shape: graph.Shape, n: int) -> int | None:
    if values is None or values.kind != "examples" or values.layout is None or values.is_choice:
        return None
    return None if graph.example_dim(shape, values.layout, n) is None else values.layout


def _own_rows(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> Any:
    """The rows of the gradient of a BatchNorm's input whose output has a gradient."""
    grad = grad_outputs[0]
    if grad is None or grad_inputs[0] is None:
        return None
    has_gradient = grad.reshape(len(grad), -1).any(1).view(-1, *(1 for _ in grad.shape[1:]))
    return (grad_inputs[0] * has_gradient, *grad_inputs[1:])
