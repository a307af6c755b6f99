"""Find where each layer call of a pass holds the examples, by backward passes from the losses of single examples.

The sizes of a layer's tensors can mislead: a table may have as many positions as the batch has examples, or a block may be
sequence-first. So the first pass of each kind runs backward from the loss of a single example, for two examples or more.
The output gradients of the layers show where the example is (`layouts`). These backward passes stop at the outputs of
layers. Passes are of one kind if they call the same layers and have the same pattern of equal sizes. Later passes of a kind
reuse the layouts.

The number of examples n is one of the sizes that layers see. The number of rows in a call of the whole model takes
precedence if it is consistent; otherwise n is the number for which most calls have their examples in rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.layouts import ROWS, SHARED, LayerOutput, Layout, entries
from lightning_bayes.curvature.loss import LossReduction, read_loss
from lightning_bayes.curvature.loss_reading import LossReader
from lightning_bayes.curvature.loss_values import Reduced
from lightning_bayes.curvature.parameter_uses import enters_measured_layer, is_measured, nodes_behind
from lightning_bayes.curvature.routing import routed_calls
from lightning_bayes.curvature.single_examples import SingleExamples, can_repeat_backward
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.private_torch import is_alive

Kind: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]  # labels of the called layers, and the pattern of equal sizes

_MAX_MORE = 8  # examples followed after the first two, if some call gets no gradient from these
_MAX_PROBES = 5  # per kind of pass, if some layers get no gradient, such as layers before zero weights


class ModelCall(NamedTuple):
    """A call of the whole model whose first input and first output have equally many rows."""

    rows: int
    edge: GradientEdge  # of the output


@dataclass(frozen=True)
class PassLayouts:
    """Where the calls of one pass hold the examples."""

    num_examples: int  # n
    examples_second: bool  # see `LossReader`
    layouts: tuple[Layout | None, ...]  # of each call; None for a call that the loss does not reach
    is_settled: bool = True  # whether later passes of this kind may reuse the layouts
    is_clear: bool = True  # whether the loss shows its reduction for this n
    is_joined: bool = True  # whether no term of the loss uses one piece of the rows alone, such as ``v[:n]``
    error: str = ""  # why the examples cannot be separated; empty if they can

    @property
    def score(self) -> tuple[int, int]:
        """Number of calls whose examples are not in rows, and how many of these have a shared output. Lower is better."""
        not_rows = [layout for layout in self.layouts if layout is not None and layout != ROWS]
        return len(not_rows), not_rows.count(SHARED)


class Plan(NamedTuple):
    """The layouts for one kind of pass. Its n is the size at `position` among the sizes of the pass, divided by `factor`."""

    position: int
    factor: int
    examples_second: bool
    layouts: tuple[Layout | None, ...]

    def for_pass(self, outputs: Sequence[LayerOutput], sizes: list[int]) -> PassLayouts | None:
        """The layouts for a pass of this kind; None if its sizes do not allow them."""
        n = max(sizes[self.position] // self.factor, 1)
        regrouped = [
            out
            for out, layout in zip(outputs, self.layouts, strict=True)
            if layout is not None and layout.kind in {"groups", "strided"}
        ]
        if sizes[self.position] % self.factor or any(out.rows % n for out in regrouped):
            return None
        return PassLayouts(n, self.examples_second, self.layouts)


class _NotFiniteError(Exception):
    """A gradient of a single example is not finite."""


class ExampleProbe:
    """Finds the layouts of passes, and remembers them by kind."""

    def __init__(self, loss_reduction: LossReduction) -> None:
        self.loss_reduction = loss_reduction
        self._plans: dict[Kind, Plan] = {}
        self._probes: Counter[Kind] = Counter()
        self._mixing = ""  # the operation by which the last loss mixes its examples

    def find(
        self,
        loss: Tensor,
        outputs: Sequence[LayerOutput],
        model_call: ModelCall | None,
        by_host: bool,
        declared: int = 0,
    ) -> PassLayouts | None:
        """Find where the calls of a pass hold the examples.

        Args:
            loss: The loss, before backward.
            outputs: The calls of the pass, in order.
            model_call: The call of the whole model, if there is one.
            by_host: Whether the training loop divided the loss.
            declared: The number of explicit per-example losses, if there are any. Each may depend on all rows.

        Returns:
            The layouts; None if no backward can follow single examples.
        """
        sizes = [
            declared,
            model_call.rows if model_call else 0,
            *(size for out in outputs for shape in ((out.rows,), *out.shapes) for size in shape),
        ]
        kind = _kind(outputs, sizes)
        planned = self._plans[kind].for_pass(outputs, sizes) if kind in self._plans else None
        if planned is not None:
            return planned
        try:
            result = self._probe(loss, outputs, model_call, by_host, declared)
        except _NotFiniteError:  # the update will be skipped
            return PassLayouts(outputs[-1].rows, False, tuple(None for _ in outputs))
        if result is None or result.error:
            return result
        self._probes[kind] += 1
        if result.is_settled or self._probes[kind] >= _MAX_PROBES:
            n = result.num_examples
            position = sizes.index(n if n in sizes else next(size for size in sizes if size and size % n == 0))
            self._plans[kind] = Plan(position, sizes[position] // n, result.examples_second, result.layouts)
        return result

    def _probe(
        self, loss: Tensor, outputs: Sequence[LayerOutput], model_call: ModelCall | None, by_host: bool, declared: int
    ) -> PassLayouts | None:
        sizes = {out.rows for out in outputs if out.rows}
        candidates = {declared} if declared else sizes | ({model_call.rows} if model_call else set())
        if candidates == {1}:
            return PassLayouts(1, False, tuple(ROWS for _ in outputs), error=_one_at_a_time(loss, outputs))
        if not can_repeat_backward(loss):
            return None
        self._mixing = ""
        attempts = [
            attempt
            for n in sorted(candidates, reverse=True)
            if n > 1
            for attempt in self._try(loss, outputs, n, model_call, by_host)
        ]
        feasible = [result for result in attempts if result is not None]
        if not declared and not any(result.is_clear for result in feasible):
            feasible = self._with_fewer(loss, outputs, by_host) or feasible
        if feasible:
            of_model = [result for result in feasible if model_call and result.num_examples == model_call.rows]
            return min(of_model or feasible, key=lambda result: result.score)
        if declared:
            edges = [GradientEdge(*edge) for out in outputs for edge in out.edges]
            grads = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
            reached = (_is_reached(output_grads) for output_grads in _by_output(outputs, grads))
            return PassLayouts(declared, False, tuple(SHARED if is_reached else None for is_reached in reached))
        if 1 in sizes and not attempts:
            return PassLayouts(1, False, tuple(ROWS if out.rows == 1 else Layout("groups") for out in outputs))
        if attempts and len(sizes) == 1:
            error = _mixed_by_loss(self._mixing) if self._mixing else _mixed_by_layer(outputs[0])
            return PassLayouts(max(sizes), False, tuple(None for _ in outputs), is_settled=False, error=error)
        return None

    def _with_fewer(self, loss: Tensor, outputs: Sequence[LayerOutput], by_host: bool) -> list[PassLayouts]:
        """Layouts for fewer examples than any layer has rows, if several rows of every layer make up one example."""
        rows = {out.rows for out in outputs if out.rows}
        for n in _sizes_of_loss(loss, by_host):
            if any(size <= n or size % n for size in rows):
                continue
            for result in self._try(loss, outputs, n, None, by_host):
                if result is None or not (result.is_clear and result.is_joined):
                    continue
                if {layout.kind for layout in result.layouts if layout is not None} <= {"groups", "strided"}:
                    return [result]
        return []

    def _is_clear(self, reader: LossReader) -> bool:
        if self.loss_reduction != "auto" or reader.loss is None:
            return True
        return isinstance(reader.loss, Reduced) and reader.loss.divisor == 1

    def _try(
        self, loss: Tensor, outputs: Sequence[LayerOutput], n: int, model_call: ModelCall | None, by_host: bool
    ) -> Iterator[PassLayouts | None]:
        """Yield layouts for n examples, or None if the calls do not fit; yield nothing if the loss does not fit."""
        for examples_second in (False, True):
            try:
                reader = read_loss(loss, n, self.loss_reduction, by_host, examples_second)
            except UnsupportedTrainingError:
                continue
            if reader is None:
                continue
            if reader.mixing:
                self._mixing = reader.mixing
                yield None
                continue
            examples = SingleExamples(loss, reader)
            if not examples.is_possible:
                continue
            model_output = None
            if model_call is not None and model_call.rows == n and is_alive(model_call.edge.node):
                model_output = model_call.edge
            result = _followed(examples, outputs, examples_second, model_output)
            if result is None:
                yield None
                continue
            yield replace(result, is_clear=self._is_clear(reader), is_joined=not reader.has_lone_pieces)
            if not any(result.score):
                return


def _sizes_of_loss(loss: Tensor, by_host: bool) -> list[int]:
    """Numbers of rows of the values between layers and loss, the largest first."""
    root = graph.root_of(loss, by_host)
    if root is None:
        return []
    nodes = (node for node in graph.in_order(root, enters_measured_layer(root)) if not graph.is_leaf(node))
    sizes = {size for node in nodes for size in graph.shape_of((node, 0))[:1] if size > 1}
    return sorted(sizes, reverse=True)


def _kind(outputs: Sequence[LayerOutput], sizes: list[int]) -> Kind:
    numbers: dict[int, int] = {}
    return tuple(out.unit.label for out in outputs), tuple(numbers.setdefault(size, len(numbers)) for size in sizes)


def _followed(
    examples: SingleExamples, outputs: Sequence[LayerOutput], examples_second: bool, model_output: GradientEdge | None
) -> PassLayouts | None:
    """The layouts that fit all followed examples; None if the examples mix."""
    n = examples.num_examples
    edges = [GradientEdge(*edge) for out in outputs for edge in out.edges]
    batch_grads = list(_by_output(outputs, examples.batch_gradients(edges)))
    fitting: list[list[Layout] | None] = [None for _ in outputs]  # None: no followed example has a gradient

    def is_settled() -> bool:
        return all(
            layouts is not None or not _is_reached(grads) for layouts, grads in zip(fitting, batch_grads, strict=True)
        )

    with examples.separated() as gradients:
        followed = dict.fromkeys((n - 1, (n - 1) // 2, *_with_gradient(outputs, batch_grads, n)))
        for count, example in enumerate(followed):
            if count > 1 and is_settled():
                break
            grads = gradients(example, edges if model_output is None else [*edges, model_output])
            if model_output is not None and not _is_in_row(grads.pop(), example):
                return None
            if not all(bool(grad.isfinite().all()) for grad in grads if grad is not None):
                raise _NotFiniteError
            for index, (out, output_grads) in enumerate(zip(outputs, _by_output(outputs, grads), strict=True)):
                layouts, earlier = out.layouts(output_grads, example, n), fitting[index]
                if layouts is not None and earlier is not None:
                    layouts = [layout for layout in earlier if layout in layouts]
                fitting[index] = earlier if layouts is None else layouts
    if not _is_anchored(outputs, fitting, n):
        return None
    for index in routed_calls(examples.loss, outputs):
        fitting[index] = []
    calls = zip(outputs, fitting, batch_grads, strict=True)
    selected = tuple(_select(out, layouts, grads, n) for out, layouts, grads in calls)
    return PassLayouts(n, examples_second, selected, is_settled())


def _select(
    output: LayerOutput, fitting: list[Layout] | None, batch_grads: list[Tensor | None], n: int
) -> Layout | None:
    """The layout of a call, given the layouts that fit the followed examples; None if the loss does not reach it."""
    if not _is_reached(batch_grads):
        return None
    if fitting is not None:
        return fitting[0] if fitting else SHARED
    has_gradient = any(grad is not None and bool(grad.any()) for grad in batch_grads)
    return ROWS if not output.rows or (output.rows == n and not has_gradient) else SHARED


def _with_gradient(outputs: Sequence[LayerOutput], batch_grads: Sequence[list[Tensor | None]], n: int) -> list[int]:
    """More examples to follow: 0, n/4, and the first example with a gradient in each call."""
    examples = [0, n // 4]
    for out, grads in zip(outputs, batch_grads, strict=True):
        grad = grads[0]
        if grad is not None and out.rows == n and out.dim is not None:
            examples += sorted(entries(grad, out.dim))[:1]
    return examples[:_MAX_MORE]


def _is_in_row(grad: Tensor | None, example: int) -> bool:
    return grad is None or entries(grad, 0) <= {example}


def _is_reached(grads: Sequence[Tensor | None]) -> bool:
    """Whether the loss depends on a call, given the gradients of its outputs."""
    return any(grad is not None for grad in grads)


def _by_output(outputs: Sequence[LayerOutput], grads: Sequence[Tensor | None]) -> Iterator[list[Tensor | None]]:
    remaining = iter(grads)
    return ([next(remaining) for _ in out.edges] for out in outputs)


def _is_anchored(outputs: Sequence[LayerOutput], fitting: Sequence[list[Layout] | None], n: int) -> bool:
    """Whether examples are separate in some first layer of the model. True if no first layer has a gradient."""
    # A first layer without a dimension that could hold the examples is a table that they share.
    of_first_layers = [
        layouts
        for out, layouts in zip(outputs, fitting, strict=True)
        if layouts is not None and out.may_hold(n) and _is_first(out)
    ]
    return any(of_first_layers) or not of_first_layers


def _is_first(output: LayerOutput) -> bool:
    """Whether no measured layer comes before this call."""
    inputs = [child for node, _ in output.edges for child, _ in node.next_functions if child is not None]
    return not any(is_measured(node) for node in nodes_behind(inputs))


def _one_at_a_time(loss: Tensor, outputs: Sequence[LayerOutput]) -> str:
    """An error message if the examples seem to pass through the layers one by one and to be stacked later; else empty."""
    label, calls = Counter(out.unit.label for out in outputs).most_common(1)[0]
    if calls == 1:
        return ""
    for node in graph.in_order(graph.root_of(loss), True):
        if graph.is_leaf(node) or graph.name_of(node) not in {"Stack", "Cat"}:
            continue
        edges = [edge for edge in graph.edges_of(node) if edge is not None]
        if len(edges) != calls or graph.shape_of((node, 0))[0] != calls:
            continue
        stacks_numbers = all(graph.is_number(edge) for edge in edges)
        if calls > 1 + stacks_numbers and _are_apart([edge[0] for edge in edges]):
            return (
                f"{label} is called {calls} times with one row, and the results are stacked, so each call may be an "
                "example. Call the network once with all examples, or return the per-example losses as well: "
                '{"loss": loss, "per_example_loss": losses}.'
            )
    return ""


def _are_apart(nodes: Sequence[Any]) -> bool:
    """Whether each node depends on layer calls, and no two nodes depend on the same one."""
    layers = [{node for node in nodes_behind([root]) if is_measured(node)} for root in nodes]
    return all(layers) and sum(map(len, layers)) == len(set().union(*layers))


def _mixed_by_loss(operation: str) -> str:
    return (
        f"The loss mixes the examples of the batch by {operation}, so no part of it belongs to one example alone, for any "
        "loss_reduction. Use a mean of per-example losses, or a method without per-example curvature, such as IVON."
    )


def _mixed_by_layer(output: LayerOutput) -> str:
    return (
        f"{output.unit.label} does not keep the examples apart: the loss of one example depends on other rows of its output "
        f"of shape {list(output.shapes[0])}. Keep the {output.rows} examples of the batch in dimension 0 of every layer's "
        "input, without operations that mix them, or freeze the layer."
    )
