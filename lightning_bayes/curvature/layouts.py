"""Layouts: where a layer's output holds the examples of the batch. Gradients of chosen examples reveal it.

    rows     example i is row i of the dimension where the layer's rule expects the examples
    groups   example i has k consecutive rows: images of a video, or positions that a reshape turned into rows
    strided  example i has the k rows i, i + n, i + 2n, …: positions first
    dim      example i is index i of another dimension, for layers that treat all leading dimensions in the same way
    shared   none of these: all examples share one output, such as position embeddings, or the layer mixes examples
    looped   shared, and measured by an `ExampleLoop`

Each layer has one of them in a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_bayes.curvature.layer_graph import LAYER
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.errors import ExampleDimensionError, UnsupportedTrainingError, name_some
from lightning_bayes.likelihood.example_dims import Shape

_KEPT, _ZERO = 5e-2, 1e-6  # tolerances relative to the largest gradient: rounding to half precision, and no gradient
REENTRANT: Final = (
    "A checkpoint of this pass is reentrant, which hides how the rows of its layers belong together. Pass "
    "use_reentrant=False to torch.utils.checkpoint (gradient_checkpointing_kwargs={'use_reentrant': False})."
)


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
        self.sources = [source for source in sources if not isinstance(source, Tensor)]  # nodes of the inputs
        self.data = [source for source in sources if isinstance(source, Tensor)]  # inputs without a node
        self.unit, self.rows, self.dim = unit, rows, dim
        self.edges: list[tuple[Any, int]] = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, tensors)]
        self.shapes: list[Shape] = [tuple(tensor.shape) for tensor in tensors]
        self.tensors = [ref(tensor) for tensor in tensors]
        self.layout, self.is_reached = ROWS, False
        self.hook: RemovableHandle | None = None
        for node, _ in self.edges:
            node.metadata[LAYER] = unit

    def drop(self) -> None:
        """Drop the autograd nodes and the hook on them. They refer to the capture, a cycle that Python cannot collect."""
        self.edges.clear()
        self.sources.clear()
        self.data.clear()
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
        """Whether some dimension of the outputs has this size. A multiple may be chance, as of the nodes of graphs."""
        return any(num_examples in shape[: -self._num_features] for shape in self.shapes)

    def possible_layouts(self, num_examples: int) -> list[Layout]:
        """The layouts that the sizes allow, most likely first."""
        in_rows = (
            [ROWS] if self.rows == num_examples else [Layout(k) for k in REGROUPED if not self.rows % num_examples]
        )
        rank = max(map(len, self.shapes), default=0) if self.takes_positions else 0
        return in_rows + [Layout("dim", dim) for dim in range(rank - self._num_features) if dim != self.dim]

    def fits(
        self, layout: Layout, batch: Sequence[Tensor | None], grads: Sequence[Tensor | None], chosen: Tensor
    ) -> bool:
        """Whether exactly the chosen examples have the gradients of the batch, and the others none."""
        later = () if self.unit.rule is None or self.dim is None else self.unit.rule.later_dims
        dims = [self.dim, *later, *(self.dim for _ in self.shapes)]
        return all(
            self._fits_output(layout, whole.reshape(shape), grad.reshape(shape), dim, chosen)
            for whole, grad, shape, dim in zip(batch, grads, self.shapes, dims[: len(self.shapes)], strict=True)
            if whole is not None and grad is not None and bool(whole.any())
        )

    def _fits_output(self, layout: Layout, batch: Tensor, grad: Tensor, dim: int | None, chosen: Tensor) -> bool:
        """`fits` for one output, whose rows are in `dim` if that is known."""
        n = len(chosen)
        if layout.kind == "dim":
            places = [layout.dim] if grad.shape[layout.dim] == n else []
        else:
            places = [d for d, size in enumerate(grad.shape) if dim in {d, None} and size == self.rows]
        moved = ((examples_first(batch, d, layout, n), examples_first(grad, d, layout, n)) for d in places)
        return any(keeps_chosen(*pair, chosen) for pair in moved)


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


def keeps_chosen(batch: Tensor, grad: Tensor, chosen: Tensor) -> bool:
    """Whether `grad` ``[n, …]`` is the gradient of the batch for the chosen examples, and zero for the others."""
    if not grad.numel():
        return True
    chosen = chosen.to(grad.device)
    kept = chosen.view(-1, *(1 for _ in grad.shape[1:]))
    difference = (grad - torch.where(kept, batch, 0)).abs().reshape(len(grad), -1).amax(1)
    return bool((difference <= batch.abs().max() * torch.where(chosen, _KEPT, _ZERO)).all())


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


def with_other_calls(total: Tensor | None, contribution: Tensor) -> Tensor:
    """The c_i of one call of a parameter, ``[B, *shape]``, added to the `total` of its other calls."""
    if total is None:
        return contribution
    if len(total) != len(contribution):
        raise ExampleDimensionError(
            f"A parameter of shape {tuple(total.shape[1:])} is used with {len(total)} and with {len(contribution)} examples "
            "in one pass, so its contributions cannot be added example by example. Use the same examples in every call, or "
            "freeze the parameter with requires_grad_(False)."
        )
    return total + contribution


def different_sizes(sizes: Mapping[str, set[int]], has_reentrant: bool) -> str:
    """The error for layers that saw different numbers of examples."""
    usual = Counter(size for of_layer in sizes.values() for size in of_layer).most_common(1)[0][0]
    others = {label: max(of_layer - {usual}) for label, of_layer in sizes.items() if of_layer != {usual}}
    first, size = next(iter(others.items()))
    message = (
        f"{first} gets {size} rows in dimension 0 of its input and other layers get {usual}, so its examples "
        "cannot be separated. Keep the examples of the batch in dimension 0 of every layer's input (expand shared "
        "inputs such as positions to the batch), freeze the layer, or return the per-example losses as well: "
        '{"loss": loss, "per_example_loss": losses}.'
    )
    if has_reentrant:
        message = f"{first} gets {size} rows in dimension 0 of its input and other layers get {usual}. {REENTRANT}"
    same = [f"{label}: {size}" for label, size in others.items() if label != first]
    return f"{message} The same holds for {name_some(same)}." if same else message
