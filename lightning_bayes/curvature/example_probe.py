"""The place of the examples in each call of a pass, found by backward passes from the losses of two examples.

What a layer's sizes say may be a coincidence: a table of as many positions as the batch has examples, a sequence-first
block. So in the first pass of its kind the loss of one example is followed backwards, twice; the layers' output gradients
show where that example is (`layouts`). Passes of one kind call the same layers with shapes that are equal and different in
the same places. The probe costs them nothing but the comparison; the first one costs two backward passes that stop at the
outputs of layers.

The number of examples n is one of the sizes that layers see: the one that the model as a whole takes and returns, if it can
be; otherwise the one under which most calls have their examples in rows.
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
from lightning_bayes.curvature.parameter_uses import enters_measured_layer, is_measured, nodes_behind
from lightning_bayes.curvature.routing import routed_calls
from lightning_bayes.curvature.single_examples import SingleExamples, can_repeat_backward
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.private_torch import is_alive

Kind: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]  # the layers called, and which of their sizes are equal

_MAX_FOLLOWED = 8  # examples, where the usual two have no gradient in some call
_MAX_PROBES = 5  # of one kind of pass whose layers have no gradient yet, such as those behind weights of zero


class Whole(NamedTuple):
    """A call of the model as a whole whose first input and first output have equally many rows.

    Attributes:
        rows: How many.
        edge: The output in autograd's graph.
    """

    rows: int
    edge: GradientEdge


class Plan(NamedTuple):
    """The layout of one kind of pass.

    Attributes:
        place: The place of the number of examples, or of a multiple, among the sizes of the pass.
        factor: The factor of the multiple.
        examples_second: See `LossReader`.
        layouts: Where each call holds the examples; None for a call that the loss does not reach.
    """

    place: int
    factor: int
    examples_second: bool
    layouts: tuple[Layout | None, ...]


@dataclass(frozen=True)
class Found:
    """The places of the examples in the calls of one pass.

    Attributes:
        num_examples: n.
        examples_second: See `LossReader`.
        layouts: The layout of each call.
        is_settled: Whether the next pass of its kind may take them for its own.
        is_clear: Whether the loss tells under this number how it reduces its examples.
        is_joined: Whether every term compares the pieces of the rows that it takes.
        error: Why single examples cannot be told apart; empty if they can.
    """

    num_examples: int
    examples_second: bool
    layouts: tuple[Layout | None, ...]
    is_settled: bool = True
    is_clear: bool = True
    is_joined: bool = True
    error: str = ""

    @property
    def score(self) -> tuple[int, int]:
        """How many calls do not have their examples in rows, and how many of these share one output."""
        elsewhere = [layout for layout in self.layouts if layout is not None and layout != ROWS]
        return len(elsewhere), elsewhere.count(SHARED)


class _NotFiniteError(Exception):
    """A gradient that is followed is not finite."""


class ExampleProbe:
    """Finds the layouts of passes, and remembers them by kind.

    Args:
        loss_reduction: How losses reduce their examples.
    """

    def __init__(self, loss_reduction: LossReduction) -> None:
        self.loss_reduction = loss_reduction
        self._plans: dict[Kind, Plan] = {}
        self._probes: dict[Kind, int] = {}
        self._mixing = ""  # the operation by which the last loss mixes its examples

    def find(
        self,
        loss: Tensor,
        outputs: Sequence[LayerOutput],
        whole: Whole | None,
        by_host: bool,
        declared: int = 0,
    ) -> Found | None:
        """The places of the examples in the calls of a pass.

        Args:
            loss: Its loss, before backward.
            outputs: Its calls, in order.
            whole: The call of the model as a whole, if there is one.
            by_host: Whether the host has divided the loss.
            declared: The number of examples, if their losses are given; then each may depend on all rows.

        Returns:
            The layouts; None if single examples cannot be followed, and all calls saw equally many.
        """
        sizes = [
            declared,
            whole.rows if whole else 0,
            *(size for out in outputs for shape in ((out.rows,), *out.shapes) for size in shape),
        ]
        kind = _kind(outputs, sizes)
        plan = self._plans.get(kind)
        if plan is not None:
            found = Found(max(sizes[plan.place] // plan.factor, 1), plan.examples_second, plan.layouts)
            if sizes[plan.place] % plan.factor == 0 and all(
                out.rows % found.num_examples == 0 for out in _regrouped(outputs, found.layouts)
            ):
                return found
        try:
            found_now = self._probe(loss, outputs, whole, by_host, declared)
        except _NotFiniteError:  # nothing can be followed, and the update will be skipped
            return Found(outputs[-1].rows, False, tuple(None for _ in outputs))
        if found_now is None or found_now.error:
            return found_now
        probes = self._probes[kind] = self._probes.get(kind, 0) + 1
        if found_now.is_settled or probes >= _MAX_PROBES:
            n = found_now.num_examples
            place = sizes.index(n) if n in sizes else next(i for i, size in enumerate(sizes) if size and size % n == 0)
            self._plans[kind] = Plan(place, sizes[place] // n, found_now.examples_second, found_now.layouts)
        return found_now

    def _probe(
        self, loss: Tensor, outputs: Sequence[LayerOutput], whole: Whole | None, by_host: bool, declared: int
    ) -> Found | None:
        sizes = {out.rows for out in outputs if out.rows}
        candidates = sorted({declared} if declared else sizes | ({whole.rows} if whole else set()), reverse=True)
        if candidates[-1:] == [1] and len(candidates) == 1:
            return Found(1, False, tuple(ROWS for _ in outputs), error=_one_at_a_time(loss, outputs))
        if not can_repeat_backward(loss):
            return None
        self._mixing = ""
        tried = [found for n in candidates if n > 1 for found in self._try(loss, outputs, n, whole, by_host)]
        feasible = [found for found in tried if found is not None]
        if not declared and not any(found.is_clear for found in feasible):
            feasible = self._with_fewer(loss, outputs, by_host) or feasible
        if feasible:
            best = min(feasible, key=lambda found: found.score)
            of_whole = [found for found in feasible if whole and found.num_examples == whole.rows]
            return min(of_whole, key=lambda found: found.score, default=best)
        if declared:
            edges = [GradientEdge(*edge) for out in outputs for edge in out.edges]
            grads = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
            is_reached = (any(grad is not None for grad in own) for own in _by_output(outputs, grads))
            return Found(declared, False, tuple(SHARED if is_in else None for is_in in is_reached))
        if 1 in sizes and not tried:
            return Found(1, False, tuple(ROWS if out.rows == 1 else Layout("groups") for out in outputs))
        if tried and len(sizes) == 1:
            error = _mixed_by_loss(self._mixing) if self._mixing else _mixed(outputs)
            return Found(max(sizes), False, tuple(None for _ in outputs), is_settled=False, error=error)
        return None

    def _with_fewer(self, loss: Tensor, outputs: Sequence[LayerOutput], by_host: bool) -> list[Found]:
        """Layouts of fewer examples than any layer has rows, all of whose rows make up examples."""
        rows = {out.rows for out in outputs if out.rows}
        for n in _sizes_of_loss(loss, by_host):
            if all(size > n and size % n == 0 for size in rows):
                for found in self._try(loss, outputs, n, None, by_host):
                    kinds = set() if found is None else {layout.kind for layout in found.layouts if layout is not None}
                    if found is not None and found.is_clear and found.is_joined and kinds <= {"groups", "strided"}:
                        return [found]
        return []

    def _is_clear(self, reader: LossReader | None) -> bool:
        if self.loss_reduction != "auto" or reader is None or reader.loss is None:
            return True
        return reader.loss.kind in {"mean", "sum"} and reader.loss.divisor == 1

    def _try(
        self, loss: Tensor, outputs: Sequence[LayerOutput], n: int, whole: Whole | None, by_host: bool
    ) -> Iterator[Found | None]:
        """The layouts under which the batch holds n examples; None where they do not fit, nothing if it cannot hold them."""
        for examples_second in (False, True):
            try:
                reader = read_loss(loss, n, self.loss_reduction, by_host, examples_second)
            except UnsupportedTrainingError:
                continue
            if reader is not None and reader.mixing:
                self._mixing = reader.mixing
                yield None
                continue
            examples = None if reader is None else SingleExamples(loss, reader)
            if examples is None or not examples.is_possible:
                continue
            given = whole.edge if whole is not None and whole.rows == n and is_alive(whole.edge.node) else None
            found = _followed(examples, outputs, examples_second, given)
            is_joined = reader is None or not reader.has_lone_pieces
            yield None if found is None else replace(found, is_clear=self._is_clear(reader), is_joined=is_joined)
            if found is not None and not any(found.score):
                return


def _sizes_of_loss(loss: Tensor, by_host: bool) -> list[int]:
    """Numbers of rows between layers and loss, where several rows of the layers may make one example; the largest first."""
    root = graph.root_of(loss)
    if by_host and root is not None:
        root = graph.behind(root)
    if root is None:
        return []
    nodes = (node for node in graph.in_order(root, enters_measured_layer(root)) if not graph.is_leaf(node))
    found = {size for node in nodes for size in graph.shape_of((node, 0))[:1]}
    return sorted((size for size in found if size > 1), reverse=True)


def _kind(outputs: Sequence[LayerOutput], sizes: list[int]) -> Kind:
    names: dict[int, int] = {}
    return tuple(out.unit.label for out in outputs), tuple(names.setdefault(size, len(names)) for size in sizes)


def _regrouped(outputs: Sequence[LayerOutput], layouts: Sequence[Layout | None]) -> list[LayerOutput]:
    pairs = zip(outputs, layouts, strict=True)
    return [out for out, layout in pairs if layout is not None and layout.kind in {"groups", "strided"}]


def _followed(
    examples: SingleExamples, outputs: Sequence[LayerOutput], examples_second: bool, whole: GradientEdge | None
) -> Found | None:
    """The layouts that fit all examples followed; None if they mix."""
    n = examples.num_examples
    edges = [GradientEdge(*edge) for out in outputs for edge in out.edges]
    of_batch = list(_by_output(outputs, examples.of_batch(edges)))
    is_reached = [any(grad is not None for grad in grads) for grads in of_batch]
    fitting: list[list[Layout] | None] = [None for _ in outputs]
    with examples.apart() as gradients:
        for count, example in enumerate(dict.fromkeys((n - 1, (n - 1) // 2, *_with_gradient(outputs, of_batch, n)))):
            if count > 1 and all(known is not None for known, is_in in zip(fitting, is_reached, strict=True) if is_in):
                break
            grads = gradients(example, edges if whole is None else [*edges, whole])
            if whole is not None and not _is_in_row(grads.pop(), example):
                return None
            if not all(bool(grad.isfinite().all()) for grad in grads if grad is not None):
                raise _NotFiniteError
            for place, (out, own) in enumerate(zip(outputs, _by_output(outputs, grads), strict=True)):
                found, before = out.layouts(own, example, n), fitting[place]
                if found is not None:
                    fitting[place] = found if before is None else [layout for layout in before if layout in found]
    if not _is_anchored(outputs, fitting, n):
        return None
    layouts: list[Layout | None] = []
    for place in routed_calls(examples.loss, outputs):
        fitting[place] = []
    for out, known, is_in, grads in zip(outputs, fitting, is_reached, of_batch, strict=True):
        without = (
            ROWS
            if not out.rows or (out.rows == n and not any(g is not None and bool(g.any()) for g in grads))
            else SHARED
        )
        layouts.append(None if not is_in else without if known is None else known[0] if known else SHARED)
    is_settled = all(known is not None for known, is_in in zip(fitting, is_reached, strict=True) if is_in)
    return Found(n, examples_second, tuple(layouts), is_settled)


def _with_gradient(outputs: Sequence[LayerOutput], of_batch: Sequence[Sequence[Tensor | None]], n: int) -> list[int]:
    """Examples that other ones than the usual may show: the first that has a gradient in each call."""
    found = [0, n // 4]
    for out, grads in zip(outputs, of_batch, strict=True):
        grad = grads[0]
        if grad is not None and out.rows == n and out.dim is not None:
            found += sorted(entries(grad, out.dim))[:1]
    return found[:_MAX_FOLLOWED]


def _is_in_row(grad: Tensor | None, example: int) -> bool:
    return grad is None or entries(grad, 0) <= {example}


def _by_output(outputs: Sequence[LayerOutput], grads: Sequence[Tensor | None]) -> Iterator[list[Tensor | None]]:
    rest = iter(grads)
    return ([next(rest) for _ in out.edges] for out in outputs)


def _is_anchored(outputs: Sequence[LayerOutput], fitting: Sequence[list[Layout] | None], n: int) -> bool:
    """Whether examples stay apart down to a layer that no other one comes before, as far as there are gradients."""
    # A first layer without any dimension that could hold the examples is a table that they share.
    pairs = zip(outputs, fitting, strict=True)
    first = [found for out, found in pairs if found is not None and out.may_hold(n) and _is_first(out)]
    return any(first) or not first


def _is_first(output: LayerOutput) -> bool:
    stack: list[Any] = [child for node, _ in output.edges for child, _ in node.next_functions]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if is_measured(node):
            return False
        stack += [child for child, _ in node.next_functions if child not in seen]
        seen.update(child for child, _ in node.next_functions)
    return True


def _one_at_a_time(loss: Tensor, outputs: Sequence[LayerOutput]) -> str:
    """A message where each example goes through the layers by itself, and a stack brings them together; else empty."""
    label, calls = Counter(out.unit.label for out in outputs).most_common(1)[0]
    for node in graph.in_order(graph.root_of(loss), True) if calls > 1 else ():
        edges = [edge for edge in graph.edges_of(node) if edge is not None] if not graph.is_leaf(node) else []
        is_stack = graph.name_of(node) in {"Stack", "Cat"} and len(edges) == calls == graph.shape_of((node, 0))[0]
        is_numbers = is_stack and all(graph.is_number(edge) for edge in edges)
        if is_stack and calls > 1 + is_numbers and _are_apart([edge[0] for edge in edges]):
            return (
                f"{label} is called {calls} times with one row, and the results are stacked, so each may be an example. "
                "Put the examples through the network in one call, or return their losses beside the loss: "
                '{"loss": loss, "per_example_loss": losses}.'
            )
    return ""


def _are_apart(nodes: Sequence[Any]) -> bool:
    """Whether nodes come out of different calls of layers."""
    layers = [{behind for behind in nodes_behind([node]) if is_measured(behind)} for node in nodes]
    return sum(map(len, layers)) == len(set().union(*layers)) and all(layers)


def _mixed_by_loss(operation: str) -> str:
    return (
        f"The loss mixes the examples of the batch by {operation}, so no part of it belongs to one example alone, whatever "
        "loss_reduction says. Average a loss of each example, or take a method without per-example curvature, such as IVON."
    )


def _mixed(outputs: Sequence[LayerOutput]) -> str:
    first = outputs[0]
    return (
        f"{first.unit.label} does not keep the examples apart: the loss of one example depends on other rows of its output "
        f"of shape {list(first.shapes[0])}. Keep the {first.rows} examples of the batch in dimension 0 of every layer's "
        "input, without operations that mix them, or freeze the layer."
    )
