"""Backward passes for the loss of one example, in the graph of the batch loss.

`example_rows` tells which tensors between layers and loss hold the examples. A mask on the gradient of these values keeps
only the gradient of one example:

    c_i = ∂L/∂v_i · ∂v_i/∂θ        v_i: the values of example i just before the reduction

A factor of the loss that is learned gets the share of the example (`learned_factors`). BatchNorm in training mode may mix
the rows: its input gradient is set to zero in rows without an output gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_bayes.curvature.example_rows import ExampleRows
from lightning_bayes.curvature.layouts import LayerOutput
from lightning_bayes.curvature.learned_factors import LearnedFactor
from lightning_bayes.curvature.parameter_uses import nodes_behind

_BATCH_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
_UNREPEATABLE = ("CheckpointFunction", "SyncBatchNorm")  # backward runs only once, or in all processes together


class Gradients(NamedTuple):
    """The results of one backward pass; None for a tensor that the loss does not depend on."""

    calls: list[list[Tensor | None]]  # of the outputs of each call
    others: list[Tensor | None]


class SingleExamples:
    """Runs backward passes for single examples."""

    def __init__(
        self,
        loss: Tensor,
        rows: ExampleRows | None,
        outputs: Sequence[LayerOutput],
        others: Sequence[GradientEdge | Tensor] = (),
        factors: Sequence[LearnedFactor] = (),
    ) -> None:
        self.loss, self.outputs, self.factors = loss, outputs, factors
        self.num_examples = 1 if rows is None else rows.num_examples
        self._cuts: dict[Any, dict[int, int]] = {}  # `ExampleRows.outer` by node and index
        for (node, index), outer in ({} if rows is None else rows.outer).items():
            self._cuts.setdefault(node, {})[index] = outer
        # torch accepts a mix of edges and leaves, but its annotation does not
        self._edges: list[Any] = [*(GradientEdge(*edge) for out in outputs for edge in out.edges), *others]
        self._example: int | None = None

    @contextmanager
    def separated(self) -> Iterator[Callable[[int | None], Gradients]]:
        """Mask gradients inside the context, so that each backward pass belongs to one example."""
        with ExitStack() as hooks:
            for node, cuts in self._cuts.items():
                hooks.enter_context(node.register_prehook(self._masked(cuts)))
            for factor in self.factors:
                hooks.enter_context(factor.node.register_hook(factor.keep(lambda: self._example)))
            for node in nodes_behind([self.loss.grad_fn]):
                if self.num_examples > 1 and node.name().startswith(_BATCH_NORMS):
                    hooks.enter_context(node.register_hook(_rows_with_gradient))
            yield self._gradients

    def learned(self) -> set[nn.Parameter]:
        """The parameters of learned factors."""
        return {param for factor in self.factors for param in factor.params()}

    def batch_gradients(self) -> Gradients:
        """The gradients of the whole loss, without masks."""
        return self._by_call(torch.autograd.grad(self.loss, self._edges, retain_graph=True, allow_unused=True))

    def _gradients(self, example: int | None) -> Gradients:
        self._example = example
        if example is None and self.num_examples == 1:  # all terms count as terms of the only example
            return self._by_call([None] * len(self._edges))
        grads = torch.autograd.grad(self.loss, self._edges, retain_graph=True, allow_unused=True)
        # Autograd captures the gradient of an edge before the prehooks of its node run.
        return self._by_call(
            grad if isinstance(edge, Tensor) else self._of_example(grad, self._cuts.get(edge.node, {}), edge.output_nr)
            for edge, grad in zip(self._edges, grads, strict=True)
        )

    def _by_call(self, grads: Iterable[Tensor | None]) -> Gradients:
        remaining = iter(grads)
        return Gradients([[next(remaining) for _ in out.edges] for out in self.outputs], list(remaining))

    def _masked(self, cuts: dict[int, int]) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
        return lambda grads: tuple(self._of_example(grad, cuts, index) for index, grad in enumerate(grads))

    def _of_example(self, grad: Tensor | None, cuts: dict[int, int], index: int) -> Tensor | None:
        """The gradient of output `index` of a node, masked if `cuts` holds the layout of its per-example values."""
        if grad is None or index not in cuts:
            return grad
        masked = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        if self._example is not None:
            shape = (cuts[index], self.num_examples, -1)
            masked.view(shape)[:, self._example] = grad.reshape(shape)[:, self._example]
        return masked


def can_repeat_backward(loss: Tensor) -> bool:
    """Whether this process alone can run backward through the graph of a loss several times."""
    if loss.grad_fn is None:  # torch's own error follows in backward
        return False
    return not any(node.name().startswith(_UNREPEATABLE) for node in nodes_behind([loss.grad_fn]))


def _rows_with_gradient(grad_inputs: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]) -> Any:
    """Keep the rows of a BatchNorm's input gradient that have an output gradient."""
    grad = grad_outputs[0]
    if grad is None or grad_inputs[0] is None:
        return None
    has_gradient = grad.reshape(len(grad), -1).any(1).view(-1, *(1 for _ in grad.shape[1:]))
    return (grad_inputs[0] * has_gradient, *grad_inputs[1:])
