"""Backward passes for the loss of one example, in the graph of the batch loss.

`loss_reading` reads a loss as a function of per-example values. A mask on the gradient of these values keeps only the
gradient of one example:

    c_i = ∂L/∂v_i · ∂v_i/∂θ        v_i: the values of example i just before the reduction

BatchNorm in training mode may mix the rows: its input gradient is set to zero in rows without an output gradient.
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
from lightning_bayes.curvature.loss_values import Content, Examples
from lightning_bayes.curvature.parameter_uses import nodes_behind

_BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
_UNREPEATABLE = ("CheckpointFunction", "SyncBatchNorm")  # backward runs only once, or in all processes together


class SingleExamples:
    """Runs backward passes for single examples.

    Args:
        loss: The loss, before its own backward. Its graph is retained.
        reader: The reader of its graph.
    """

    def __init__(self, loss: Tensor, reader: LossReader) -> None:
        self.loss, self.num_examples = loss, reader.batch_size
        self._cuts = _cuts(reader, reader.batch_size)
        self._example: int | None = None

    @property
    def is_possible(self) -> bool:
        """Whether the per-example values of the loss can be separated."""
        return bool(self._cuts)

    @contextmanager
    def separated(self) -> Iterator[Callable[[int | None, Sequence[GradientEdge | Tensor]], list[Tensor | None]]]:
        """Mask gradients inside the context, so that each backward pass belongs to one example.

        Yields:
            A function from an example index and edges or leaves to the gradients of the example's part of the loss. With
            the index None, it returns the gradients of the terms that do not depend on any example.
        """
        handles = [node.register_prehook(self._masked(cuts)) for node, cuts in self._cuts.items()]
        for node in nodes_behind([self.loss.grad_fn]):
            if graph.name_of(node).startswith(_BATCH_NORMS):
                handles.append(node.register_hook(_rows_with_gradient))
        try:
            yield self._gradients
        finally:
            for handle in handles:
                handle.remove()

    def batch_gradients(self, inputs: Sequence[GradientEdge | Tensor]) -> list[Tensor | None]:
        """The gradients of the whole loss with respect to edges or leaves, without masks."""
        mixed_inputs: Any = list(inputs)  # torch accepts a mix of edges and leaves, but its annotation does not
        return list(torch.autograd.grad(self.loss, mixed_inputs, retain_graph=True, allow_unused=True))

    def _gradients(self, example: int | None, inputs: Sequence[GradientEdge | Tensor]) -> list[Tensor | None]:
        self._example = example
        grads = self.batch_gradients(inputs)
        # Autograd captures the gradient of an edge before the prehooks of its node run.
        for index, edge in enumerate(inputs):
            outer = None if isinstance(edge, Tensor) else self._cuts.get(edge.node, {}).get(edge.output_nr)
            grad = grads[index]
            if outer is not None and grad is not None:
                grads[index] = self._of_example(grad, outer)
        return grads

    def _masked(self, layouts: dict[int, int]) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
        def mask(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(
                self._of_example(grad, layouts[index]) if index in layouts and grad is not None else grad
                for index, grad in enumerate(grads)
            )

        return mask

    def _of_example(self, grad: Tensor, outer: int) -> Tensor:
        masked = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        if self._example is not None:
            by_example = grad.reshape(outer, self.num_examples, -1)
            masked.view(outer, self.num_examples, -1)[:, self._example] = by_example[:, self._example]
        return masked


def can_repeat_backward(loss: Tensor) -> bool:
    """Whether this process alone can run backward through the graph of a loss several times."""
    return not any(graph.name_of(node).startswith(_UNREPEATABLE) for node in nodes_behind([loss.grad_fn]))


def _cuts(reader: LossReader, n: int) -> dict[Any, dict[int, int]]:
    """The layouts of the per-example values, by node and output index; empty if they cannot be separated."""
    cuts: dict[Any, dict[int, int]] = {}
    stack: list[tuple[Any, int]] = [(reader.root, 0)]
    seen = set(stack)
    while stack:
        edge = stack.pop()
        content = reader.content_of(edge)
        layout = _layout(content, graph.shape_of(edge), n)
        if layout is not None:
            cuts.setdefault(edge[0], {})[edge[1]] = layout
        elif graph.is_layer(edge[0]):
            return {}
        elif content is not None:
            children = [child for child in graph.edges_of(edge[0]) if child is not None and child not in seen]
            seen.update(children)
            stack += children
    return cuts


def _layout(content: Content | None, shape: graph.Shape, n: int) -> int | None:
    if not isinstance(content, Examples) or content.layout is None or content.selection is not None:
        return None
    return None if graph.example_dim(shape, content.layout, n) is None else content.layout


def _rows_with_gradient(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> Any:
    """Keep the rows of a BatchNorm's input gradient that have an output gradient."""
    grad = grad_outputs[0]
    if grad is None or grad_inputs[0] is None:
        return None
    has_gradient = grad.reshape(len(grad), -1).any(1).view(-1, *(1 for _ in grad.shape[1:]))
    return (grad_inputs[0] * has_gradient, *grad_inputs[1:])
