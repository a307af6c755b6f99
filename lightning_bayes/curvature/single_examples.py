"""Backward passes for chosen examples, in the graph of the batch loss.

The record of the loss tells which values it reduces over the examples, or which arguments its loss function has. A mask on
the gradient of these values keeps only that of the chosen examples:

    Σ_{i chosen} ∂L/∂v_i · ∂v_i/∂θ        v_i: the values of example i just before the reduction

For a loss without such a record, the outputs of the last layers hold the examples. BatchNorm in training mode mixes the
rows. Where rows are told apart, it is skipped: its input gets the gradient of its output. Gradients of examples keep it.

A learned factor φ of a loss, such as Kendall's weights of tasks, multiplies values that are reduced already. Where the loss
is linear in these, the part of example i in its gradient is the derivative of this example's values:

    L = Σ_j a_j(φ) v_j        ∂/∂φ Σ_{j in i} v_j ∂L/∂v_j
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_bayes.curvature.layer_graph import LAYER, nodes_behind
from lightning_bayes.curvature.loss_reader import ExampleRows, LossReader
from lightning_bayes.curvature.loss_terms import Edge
from lightning_bayes.likelihood.example_dims import Order, example_dim, outer_size
from lightning_bayes.private_torch import output_shapes, without_torch_functions


def example_rows(reader: LossReader, loss: Tensor, num_examples: int, order: Order) -> ExampleRows | None:
    """Where the tensors between layers and loss hold the examples; None if these shapes do not fit."""
    found = reader.rows(loss, num_examples, order)
    if found is not None and not _last_layers(loss.grad_fn, found.outer):
        return found
    outer = {edge: _outer(edge, num_examples, order) for edge in _last_layers(loss.grad_fn, ())}
    sizes = {edge: size for edge, size in outer.items() if size is not None}
    return ExampleRows(num_examples, order, sizes) if sizes and len(sizes) == len(outer) else None


def _last_layers(root: Any, ends: Collection[Edge]) -> list[Edge]:
    """The outputs of layers that a node depends on, not by way of another layer or of one of the ends."""
    found: list[Edge] = []
    stack: list[Edge] = [(root, 0)]
    seen = set(stack)
    while stack:
        edge = stack.pop()
        if edge in ends:
            continue
        if LAYER in edge[0].metadata:
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


class SingleExamples:
    """Runs backward passes for chosen examples, to edges or leaves."""

    def __init__(
        self, reader: LossReader, loss: Tensor, rows: ExampleRows, ends: Sequence[GradientEdge | Tensor]
    ) -> None:
        self.loss, self.num_examples = loss, rows.num_examples
        self._ends: list[Any] = list(ends)  # torch accepts a mix of edges and leaves, but its annotation does not
        self._norms = list(reader.record.noted("batch_norm", nodes_behind([loss.grad_fn])))
        self._cuts: dict[Any, dict[int, int]] = {}  # `ExampleRows.outer` by node and index
        for (node, index), outer in rows.outer.items():
            self._cuts.setdefault(node, {})[index] = outer
        self._scaled = _scaled_parts(reader, loss, rows) if self.num_examples > 1 else None

    @contextmanager
    def separated(self, skips_norms: bool = True) -> Iterator[Callable[[Tensor], list[Tensor | None]]]:
        """Inside the context, the function returns the gradients of the examples that a mask ``[n]`` chooses."""
        chosen = torch.ones(self.num_examples, dtype=torch.bool)

        def gradients(mask: Tensor) -> list[Tensor | None]:
            chosen.copy_(mask)
            if not self._cuts:  # all terms count as terms of the only example
                return self.of_batch() if bool(mask.all()) else [None] * len(self._ends)
            # Autograd captures the gradient of an edge before the prehooks of its node run.
            pairs = zip(self._ends, self.of_batch(), strict=True)
            found = [g if isinstance(e, Tensor) else self._masked(g, e.node, e.output_nr, chosen) for e, g in pairs]
            others = zip(found, self.of_factors(~chosen), strict=True)
            return [grad if grad is None or other is None else grad - other for grad, other in others]

        with ExitStack() as hooks:
            for node in self._cuts:
                hooks.enter_context(node.register_prehook(self._mask_of(node, chosen)))
            for node in self._norms if self._cuts and skips_norms else ():
                hooks.enter_context(node.register_hook(_skipped))
            yield gradients

    def of_batch(self) -> list[Tensor | None]:
        """The gradients of the whole loss."""
        return list(torch.autograd.grad(self.loss, self._ends, retain_graph=True, allow_unused=True))

    def of_factors(self, mask: Tensor) -> list[Tensor | None]:
        """The part of the examples in a mask ``[n]`` in the gradients of learned factors; None for other ends."""
        if self._scaled is None:
            return [None] * len(self._ends)
        with torch.enable_grad(), without_torch_functions():
            chosen = torch.where(mask.to(self._scaled.device), self._scaled, 0).sum()
        return list(torch.autograd.grad(chosen, self._ends, retain_graph=True, allow_unused=True))

    def _mask_of(self, node: Any, chosen: Tensor) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
        return lambda grads: tuple(self._masked(grad, node, index, chosen) for index, grad in enumerate(grads))

    def _masked(self, grad: Tensor | None, node: Any, index: int, chosen: Tensor) -> Tensor | None:
        """The gradient of an output of a node, masked if `_cuts` holds the layout of its per-example values."""
        outer = self._cuts.get(node, {}).get(index)
        if grad is None or outer is None:
            return grad
        split = grad.reshape(outer, self.num_examples, -1)
        return torch.where(chosen.to(grad.device)[:, None], split, 0).reshape(grad.shape)


def _scaled_parts(reader: LossReader, loss: Tensor, rows: ExampleRows) -> Tensor | None:
    """Σ_j v_j ∂L/∂v_j of each example, ``[n]``, over the values that learned factors multiply; None without any."""
    terms = reader.scaled(loss)
    if not terms:
        return None
    with torch.enable_grad(), without_torch_functions():
        edges = [GradientEdge(*term.edge) for term in terms]
        weights = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
        found = [
            t.parts(w, rows.num_examples, rows.order) for t, w in zip(terms, weights, strict=True) if w is not None
        ]
        parts = [each for each in found if each is not None and each.requires_grad]
        return torch.stack(parts).sum(0) if parts else None


def _skipped(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> Any:
    """Pass the gradient of a BatchNorm's output on to its input."""
    if grad_inputs[0] is None or grad_outputs[0] is None:
        return None
    return (grad_outputs[0].to(grad_inputs[0].dtype), *grad_inputs[1:])
