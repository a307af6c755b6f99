"""Layouts: where a layer's output holds the examples of the batch. Gradients of single-example losses reveal it.

rows     example i is row i of the dimension where the layer's rule expects the examples
groups   example i has k consecutive rows: images of a video, or positions that a reshape turned into rows
strided  example i has the k rows i, i + n, i + 2n, …: positions first
dim      example i is index i of another dimension, for layers that treat all leading dimensions in the same way
shared   none of these: all examples share one output, such as position embeddings, or the layer mixes examples
looped   shared, and measured by an `ExampleLoop`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_bayes.curvature.example_dims import Shape
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.curvature.parameter_uses import mark_measured
from lightning_bayes.errors import UnsupportedTrainingError

_TOLERANCE = 1e-6  # relative to the largest gradient


class Layout(NamedTuple):
    """Where a call holds the examples; the kinds are explained above."""

    kind: str = "rows"
    dim: int = 0  # for kind "dim"


ROWS, SHARED, LOOPED = Layout("rows"), Layout("shared"), Layout("looped")
REGROUPED = ("groups", "strided")  # kinds with several rows for each example


class LayerOutput:
    """The differentiable outputs of one call of a measured module."""

    def __init__(
        self, unit: MeasuredModule, rows: int, dim: int | None, tensors: Sequence[Tensor], sources: list[Any]
    ) -> None:
        self.sources = sources
        self.unit, self.rows, self.dim = unit, rows, dim
        self.edges: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, tensors)]
        self.shapes: list[Shape] = [tuple(tensor.shape) for tensor in tensors]
        self.tensors = [ref(tensor) for tensor in tensors]
        self.layout, self.is_reached = ROWS, False
        self.hook: RemovableHandle | None = None
        for node, _ in self.edges:
            mark_measured(node, unit)

    def drop(self) -> None:
        """Drop the autograd nodes and the hook on them. They refer to the capture, a cycle that Python cannot collect."""
        self.edges.clear()
        self.sources.clear()
        if self.hook is not None:
            self.hook.remove()

    def refuse_shared(self) -> NoReturn:
        """Raise `UnsupportedTrainingError` for a shared call that no `ExampleLoop` has measured."""
        raise UnsupportedTrainingError(
            f"A backward from a loss that was not observed reached {self.unit.label}, whose output all examples share. "
            "Add the losses and call loss.backward() once, or open one pass for each backward."
        )

    @property
    def takes_positions(self) -> bool:
        """Whether the layer treats all leading dimensions in the same way."""
        return self.unit.rule is not None and self.unit.rule.takes_positions

    @property
    def _num_features(self) -> int:
        """Number of trailing feature dimensions of the output."""
        return 1 if self.unit.rule is None else max(1, self.unit.rule.least_dims(self.unit.module) - 1)

    def may_hold(self, num_examples: int) -> bool:
        """Whether some dimension of the outputs could hold this many examples."""
        return any(size % num_examples == 0 for shape in self.shapes for size in shape[: -self._num_features])

    def layouts(self, grads: list[Tensor | None], example: int, num_examples: int) -> list[Layout] | None:
        """The layouts consistent with the gradient of one example's loss, most likely first; None if it is zero."""
        consistent = [
            list(self._fitting(grad.reshape(shape), dim, example, num_examples))
            for grad, shape, dim in zip(grads, self.shapes, self.dims, strict=True)
            if grad is not None and bool(grad.any())
        ]
        if not consistent:
            return None
        return [layout for layout in consistent[0] if all(layout in others for others in consistent)]

    @property
    def dims(self) -> list[int | None]:
        """The dimension of each output that holds the rows; None if unknown."""
        later = () if self.unit.rule is None or self.dim is None else self.unit.rule.later_dims
        return [self.dim, *later, *(self.dim for _ in self.shapes)][: len(self.shapes)]

    def _fitting(self, grad: Tensor, row_dim: int | None, example: int, n: int) -> Iterator[Layout]:
        """The layouts of one output in which only this example has a gradient."""
        dims = [d for d in range(grad.dim()) if row_dim in {d, None} and grad.shape[d] == self.rows]
        regrouped = [Layout(kind) for kind in REGROUPED if self.rows % n == 0]
        for layout in [ROWS] if self.rows == n else regrouped:
            if any(entries(examples_first(grad, d, layout, n), 0) <= {example} for d in dims):
                yield layout
        if self.takes_positions:
            others = (d for d in range(grad.dim() - self._num_features) if d != row_dim and grad.shape[d] == n)
            yield from (Layout("dim", d) for d in others if entries(grad, d) <= {example})


@contextmanager
def retained_grads_kept(outputs: Iterable[LayerOutput]) -> Iterator[None]:
    """Clear the gradients that users retain in layer outputs (`torch.Tensor.retain_grad`), and restore them on exit."""
    alive = (reference() for output in outputs for reference in output.tensors)
    with gradients_restored(tensor for tensor in alive if tensor is not None and tensor.retains_grad):
        yield


@contextmanager
def gradients_restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Clear the ``.grad`` of tensors on entry and restore it on exit."""
    saved = [(tensor, tensor.grad) for tensor in tensors]
    for tensor, _ in saved:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in saved:
            tensor.grad = grad


def entries(grad: Tensor, dim: int) -> set[int]:
    """The indices of a dimension at which a gradient is not zero, up to rounding."""
    if not grad.numel() or not bool(grad.any()):
        return set()
    sizes = grad.detach().abs().movedim(dim, 0).reshape(grad.shape[dim], -1).amax(1)
    return set((sizes > _TOLERANCE * sizes.max()).nonzero().flatten().tolist())


def examples_first(value: Tensor, dim: int, layout: Layout, num_examples: int) -> Tensor:
    """Move the examples of a tensor with rows in `dim` to dimension 0. Several rows of an example become dimension 1."""
    rows = value.movedim(layout.dim if layout.kind == "dim" else dim, 0)
    if layout.kind == "groups":
        return torch.unflatten(rows, 0, (num_examples, -1))
    if layout.kind == "strided":
        return torch.unflatten(rows, 0, (-1, num_examples)).transpose(0, 1)
    return rows


def added_up(contributions: Tensor, layout: Layout, num_examples: int) -> Tensor:
    """Sum the contributions ``[R, *shape]`` of all rows to contributions of the examples, ``[n, *shape]``."""
    is_regrouped = layout.kind in REGROUPED
    return examples_first(contributions, 0, layout, num_examples).sum(1) if is_regrouped else contributions
