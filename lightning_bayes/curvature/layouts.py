"""The place of the batch's examples in a layer's output, found by the gradients of single examples' losses.

rows     row i of the dimension in which the layer's rule has the examples
groups   k rows for each example, one after the other: images of a video, positions that a reshape has made rows
strided  k rows for each example, every n-th: positions first
dim      index i of another dimension, for layers that treat all leading dimensions alike
shared   none of these: one output for all examples, such as position embeddings, or examples that mix
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_bayes.curvature.loss_graph import Shape
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.errors import UnsupportedTrainingError

_NOTHING = 1e-6  # of the largest gradient


class Layout(NamedTuple):
    """The place of the examples in a call.

    Attributes:
        kind: One of the words above.
        dim: The dimension of a ``"dim"``.
    """

    kind: str = "rows"
    dim: int = 0


ROWS, SHARED = Layout("rows"), Layout("shared")


@dataclass(eq=False)
class LayerOutput:
    """The differentiable outputs of one call of a measured module.

    Attributes:
        unit: The module.
        rows: How many examples the call holds, as far as its rule or its first input can tell.
        dim: The dimension of the first output that holds them; None if each has its own.
        edges: Node of autograd's graph and number of its output, for each.
        shapes: Shape of each.
        tensors: Weak reference to each.
        layout: Where the examples are.
        is_looped: Whether its contributions were taken one example at a time.
    """

    unit: MeasuredModule
    rows: int
    dim: int | None
    edges: list[tuple[Any, int]]
    shapes: list[Shape]
    tensors: list[ReferenceType[Tensor]]
    layout: Layout = field(default=ROWS)
    is_looped: bool = False

    @classmethod
    def of(cls, unit: MeasuredModule, rows: int, dim: int | None, tensors: Sequence[Tensor]) -> LayerOutput:
        """The outputs of a call; arguments as the attributes."""
        edges = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, tensors)]
        return cls(unit, rows, dim, edges, [tuple(tensor.shape) for tensor in tensors], list(map(ref, tensors)))

    def require_loop(self) -> None:
        """Require contributions of a shared call that were taken one example at a time.

        Raises:
            UnsupportedTrainingError: If no observed loss has reached the call.
        """
        if not self.is_looped:
            raise UnsupportedTrainingError(
                f"A backward reached {self.unit.label}, whose output all examples share, from a loss that was not shown "
                "before. Add the losses and call loss.backward() once, or open one pass for each backward."
            )

    @property
    def takes_positions(self) -> bool:
        """Whether the layer treats all leading dimensions alike."""
        return self.unit.rule is not None and self.unit.rule.takes_positions

    @property
    def _num_features(self) -> int:
        """How many of the last dimensions of the output hold features."""
        return 1 if self.unit.rule is None else max(1, self.unit.rule.least_dims(self.unit.module) - 1)

    def may_hold(self, num_examples: int) -> bool:
        """Whether some dimension of the outputs could hold so many examples."""
        return any(size % num_examples == 0 for shape in self.shapes for size in shape[: -self._num_features])

    def layouts(self, grads: list[Tensor | None], example: int, num_examples: int) -> list[Layout] | None:
        """The layouts that fit the gradient of one example's loss.

        Args:
            grads: The gradients of the outputs.
            example: Number of the example, i.
            num_examples: Number of examples, n.

        Returns:
            The layouts, the likeliest first; None if the gradient is zero.
        """
        each = zip(grads, self.shapes, self.dims, strict=True)
        known = [(g.reshape(shape), dim) for g, shape, dim in each if g is not None and bool(g.any())]
        if not known:
            return None
        fitting = [list(self._fitting(g, dim, example, num_examples)) for g, dim in known]
        return [layout for layout in fitting[0] if all(layout in others for others in fitting)]

    @property
    def dims(self) -> list[int | None]:
        """The dimension of each output that holds the examples."""
        later = () if self.unit.rule is None or self.dim is None else self.unit.rule.later_dims
        return [self.dim, *later, *(self.dim for _ in self.shapes)][: len(self.shapes)]

    def _fitting(self, grad: Tensor, dim: int | None, example: int, n: int) -> Iterator[Layout]:
        k, is_whole = self.rows // n, self.rows % n == 0
        dims = range(grad.dim()) if dim is None else [dim]
        held = [entries(grad, d) for d in dims if d < grad.dim() and grad.shape[d] == self.rows]
        if self.rows == n and any(found <= {example} for found in held):
            yield ROWS
        if is_whole and k > 1:
            if any(found <= set(range(example * k, example * k + k)) for found in held):
                yield Layout("groups")
            if any(found <= set(range(example, self.rows, n)) for found in held):
                yield Layout("strided")
        if self.takes_positions:
            others = (d for d in range(grad.dim() - self._num_features) if d != dim and grad.shape[d] == n)
            yield from (Layout("dim", d) for d in others if entries(grad, d) <= {example})


@contextmanager
def retained_grads_kept(outputs: Iterable[LayerOutput]) -> Iterator[None]:
    """Keep the gradients that users retain in outputs of layers (`torch.Tensor.retain_grad`) as they are.

    Args:
        outputs: The calls.

    Yields:
        Nothing.
    """
    alive = (reference() for output in outputs for reference in output.tensors)
    kept = [(tensor, tensor.grad) for tensor in alive if tensor is not None and tensor.retains_grad]
    for tensor, _ in kept:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in kept:
            tensor.grad = grad


def entries(grad: Tensor, dim: int) -> set[int]:
    """The indices of a dimension at which a gradient is not zero, except for rounding."""
    if not grad.numel() or not bool(grad.any()):
        return set()
    sizes = grad.detach().abs().movedim(dim, 0).reshape(grad.shape[dim], -1).amax(1)
    return set((sizes > _NOTHING * sizes.max()).nonzero().flatten().tolist())


def examples_first(value: Any, dim: int | None, layout: Layout, num_examples: int) -> Any:
    """An input or a gradient with its examples, or the rows of each example one after the other, in dimension 0.

    Args:
        value: A tensor, or anything else, which stays.
        dim: Where a rule has the examples; None for what all examples share.
        layout: Where they are.
        num_examples: n.

    Returns:
        The rearranged value.
    """
    if dim is None or not isinstance(value, Tensor):
        return value
    if layout.kind == "dim":
        return value.movedim(layout.dim, 0)
    rows = value.movedim(dim, 0)
    if layout.kind == "strided":
        rows = torch.unflatten(rows, 0, (-1, num_examples)).transpose(0, 1).flatten(0, 1)
    return rows


def in_groups(value: Any, dim: int | None, layout: Layout, num_examples: int) -> Any:
    """An input or a gradient with the rows of each example one after the other, in the dimension where they are.

    Args:
        value: A tensor, a tuple of tensors, or anything else, which stays.
        dim: Where a rule has the examples; None for what all examples share.
        layout: ``"groups"`` or ``"strided"``.
        num_examples: n.

    Returns:
        The rearranged value.
    """
    if isinstance(value, tuple):
        return tuple(in_groups(each, dim, layout, num_examples) for each in value)
    if dim is None or not isinstance(value, Tensor) or layout.kind != "strided":
        return value
    return torch.unflatten(value, dim, (-1, num_examples)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def added_up(contributions: Tensor, layout: Layout, num_examples: int) -> Tensor:
    """Contributions of examples from those of their rows.

    Args:
        contributions: One for each row, ``[R, *shape]``.
        layout: Where the examples are.
        num_examples: n.

    Returns:
        One for each example, ``[n, *shape]``.
    """
    if layout.kind == "groups":
        return torch.unflatten(contributions, 0, (num_examples, -1)).sum(1)
    return torch.unflatten(contributions, 0, (-1, num_examples)).sum(0) if layout.kind == "strided" else contributions
