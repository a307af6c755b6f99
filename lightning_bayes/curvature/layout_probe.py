"""Where each layer call of a pass holds the examples: backward passes from chosen examples tell.

The sizes of a layer's tensors can mislead: a table may have as many positions as the batch has examples, or a block may be
sequence-first. So one backward pass runs for each bit of an example's number, from the losses of the examples with this
bit. The rows of a layer's output that get the gradient of the whole batch, and those that get none, must be those of its
layout (`layouts`). These passes stop at the outputs of layers.

The number of examples n is one of the sizes that layers see. The number of rows in a call of the whole model takes
precedence if it is consistent; otherwise n is the number for which most calls have their examples in rows. Later passes of
a kind, with the same calls and the same pattern of equal sizes, reuse the layouts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_bayes.curvature.divided_batches import one_at_a_time, routed_calls
from lightning_bayes.curvature.gradient_check import CheckedParameters
from lightning_bayes.curvature.layer_graph import can_repeat_backward, comes_after_layer
from lightning_bayes.curvature.layouts import REGROUPED, ROWS, SHARED, LayerOutput, Layout, keeps_chosen
from lightning_bayes.curvature.loss_reader import ExampleRows, LossReader
from lightning_bayes.curvature.single_examples import SingleExamples, example_rows
from lightning_bayes.likelihood.example_dims import ORDERS, Order
from lightning_bayes.private_torch import is_alive

Kind: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]  # labels of the called layers, and the pattern of equal sizes

_MAX_PROBES = 5  # per kind of pass, if some layers get no gradient, such as layers before zero weights


@dataclass(frozen=True)
class PassLayouts:
    """Where the calls of one pass hold the examples."""

    num_examples: int  # n
    layouts: tuple[Layout | None, ...]  # of each call; None for a call that the loss does not reach
    order: Order = "rows"  # how the values that the loss reduces hold the examples
    is_settled: bool = True  # whether later passes of this kind may reuse the layouts
    is_recorded: bool = True  # see `ExampleRows`
    error: str = ""  # why the examples cannot be separated; empty if they can
    kind: Any = None  # of the pass

    @property
    def score(self) -> tuple[int, int]:
        """Number of calls whose examples are not in rows, and how many of these have a shared output. Lower is better."""
        not_rows = [layout for layout in self.layouts if layout is not None and layout != ROWS]
        return len(not_rows), not_rows.count(SHARED)


class ModelCall(NamedTuple):
    """A call of the whole model whose first input and first output have equally many rows; 0 rows if there is none."""

    rows: int = 0
    edge: Any = None  # of the output


class NotFiniteError(Exception):
    """A gradient of the pass is not finite."""


class LayoutProbe:
    """Finds the layouts of passes, and remembers them by kind."""

    def __init__(self) -> None:
        self._known: dict[Kind, tuple[int, PassLayouts]] = {}  # and the position of n among the sizes of the pass
        self._probes: Counter[Kind] = Counter()
        self.checked: defaultdict[Kind, CheckedParameters] = defaultdict(CheckedParameters)

    def knows(self, layouts: PassLayouts) -> bool:
        """Whether later passes of the same kind have these layouts."""
        return layouts.kind in self._known

    def find(self, probed: ProbedPass, following: Callable[[], AbstractContextManager[None]]) -> PassLayouts | None:
        """The layouts of a pass, probed inside the context; None if no backward can follow chosen examples."""
        kind, sizes = probed.kind_and_sizes()
        if kind in self._known:
            position, known = self._known[kind]
            n = max(1, sizes[position])
            pairs = zip(probed.outputs, known.layouts, strict=True)
            if not any(out.rows % n for out, layout in pairs if layout is not None and layout.kind in REGROUPED):
                return replace(known, num_examples=n)
        try:
            with following():
                result = probed.layouts()
        except NotFiniteError:  # the update will be skipped
            return PassLayouts(probed.outputs[-1].rows, (None,) * len(probed.outputs))
        if result is None or result.error:
            return result
        result = replace(result, kind=kind)
        self._probes[kind] += 1
        if result.is_settled or self._probes[kind] >= _MAX_PROBES:
            self._known[kind] = sizes.index(result.num_examples), result
        return result


@dataclass(frozen=True)
class ProbedPass:
    """One pass, before backward."""

    loss: Tensor
    outputs: Sequence[LayerOutput]  # of the calls, in order
    model_call: ModelCall  # the call of the whole model
    reader: LossReader
    num_losses: int = 0  # number of explicit per-example losses, each of which may depend on all rows

    def kind_and_sizes(self) -> tuple[Kind, list[int]]:
        """The kind of the pass, and all its sizes in a fixed order."""
        of_outputs = [size for out in self.outputs for shape in ((out.rows,), *out.shapes) for size in shape]
        sizes = [self.num_losses, self.model_call.rows, *of_outputs, *self.reader.sizes(self.loss), 1]
        numbers: dict[int, int] = {}
        pattern = tuple(numbers.setdefault(size, len(numbers)) for size in sizes)
        return (tuple(out.unit.label for out in self.outputs), pattern), sizes

    def layouts(self) -> PassLayouts | None:
        """The layouts for the best number of examples that the sizes allow; None if no backward can follow examples."""
        rows = {out.rows for out in self.outputs if out.rows}
        candidates = {self.num_losses} if self.num_losses else {*rows, self.model_call.rows} - {0}
        if candidates == {1}:
            return self._one_example(one_at_a_time(self.reader, self.loss, self.outputs))
        if not can_repeat_backward(self.loss):
            return None
        attempts = [result for n in sorted(candidates - {1}, reverse=True) for result in self._attempts(n)]
        feasible = [result for result in attempts if not result.error]
        if not self.num_losses and not any(result.is_recorded for result in feasible):
            feasible = self._with_fewer(rows) or feasible
        if feasible:
            return min(feasible, key=lambda result: (result.num_examples != self.model_call.rows, result.score))
        if self.num_losses:  # which may depend on all rows
            grads = torch.autograd.grad(self.loss, self._edges, retain_graph=True, allow_unused=True)
            reached = [any(grad is not None for grad in of_call) for of_call in self._by_call(grads)]
            return PassLayouts(self.num_losses, tuple(SHARED if is_reached else None for is_reached in reached))
        if 1 in rows and not attempts:  # the loss fits no other number
            return self._one_example()
        return attempts[0] if attempts and len(rows) == 1 else None  # an error

    def _attempts(self, n: int) -> Iterator[PassLayouts]:
        """Yield layouts for n examples, or the error that these mix; yield nothing if the loss does not fit."""
        tried: list[dict[Any, int]] = []
        for order in ORDERS:
            rows = example_rows(self.reader, self.loss, n, order)
            if rows is None or rows.outer in tried:
                continue
            tried.append(rows.outer)
            result = self._probed(rows)
            yield result
            if not result.error and not any(result.score):
                return

    def _with_fewer(self, rows: set[int]) -> list[PassLayouts]:
        """Layouts for fewer examples than any layer has rows, if several rows of every layer make up one example."""
        for n in sorted(set(self.reader.sizes(self.loss)), reverse=True):
            if n < 2 or any(size <= n or size % n for size in rows):
                continue
            for result in self._attempts(n):
                kinds = {layout.kind for layout in result.layouts if layout is not None}
                if result.is_recorded and not result.error and kinds.issubset(REGROUPED):
                    return [result]
        return []

    def _probed(self, rows: ExampleRows) -> PassLayouts:
        """The layouts that fit the gradients of chosen examples, or the error that the examples mix."""
        n, model = rows.num_examples, self.model_call
        ends = [model.edge] if model.rows == n and is_alive(model.edge.node) else []
        examples, numbers = SingleExamples(self.reader, self.loss, rows, [*self._edges, *ends]), torch.arange(n)
        with examples.separated() as gradients:
            batch = gradients(numbers >= 0)
            calls = [_Call(*pair, n) for pair in zip(self.outputs, self._by_call(batch), strict=True)]
            for bit in range((n - 1).bit_length()):
                chosen = (numbers >> bit) % 2 == 1
                grads = gradients(chosen)
                for call, of_call in zip(calls, self._by_call(grads), strict=True):
                    call.keep_fitting(of_call, chosen)
                whole, part = batch[-1], grads[-1]
                if ends and whole is not None and part is not None and not keeps_chosen(whole, part, chosen):
                    return self._mixed(n)
        first = [call for call in calls if call.is_first and call.has_gradient and call.output.may_hold(n)]
        # A first layer without a dimension that could hold the examples is a table that they share.
        if first and not any(call.fitting for call in first):
            return self._mixed(n)
        routed = routed_calls(self.reader, self.loss, self.outputs, n)
        layouts = tuple(call.layout(n, index in routed) for index, call in enumerate(calls))
        is_settled = all(call.has_gradient or not call.is_reached for call in calls)
        return PassLayouts(n, layouts, rows.order, is_settled, rows.is_recorded)

    @property
    def _edges(self) -> list[Any]:
        return [GradientEdge(*edge) for out in self.outputs for edge in out.edges]

    def _by_call(self, grads: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """The gradients of `_edges` by call."""
        remaining = iter(grads)
        return [[next(remaining) for _ in out.edges] for out in self.outputs]

    def _one_example(self, error: str = "") -> PassLayouts:
        """The layouts for a batch of one example, to which all rows of a call belong."""
        layouts = tuple(ROWS if out.rows == 1 else Layout("groups") for out in self.outputs)
        return PassLayouts(1, layouts, error=error)

    def _mixed(self, num_examples: int) -> PassLayouts:
        """The error for examples that a layer mixes."""
        first = self.outputs[0]
        error = (
            f"{first.unit.label} does not keep the examples apart: the loss of one example depends on other rows of its "
            f"output of shape {list(first.shapes[0])}. Keep the {first.rows} examples of the batch in dimension 0 of every "
            "layer's input, without operations that mix them, freeze the layer, or return the per-example losses as well: "
            '{"loss": loss, "per_example_loss": losses}. Or use IVON or SWAG, which measure no single examples.'
        )
        return PassLayouts(num_examples, (None,) * len(self.outputs), error=error)


class _Call:
    """A call of the pass, and the layouts that fit the gradients of the chosen examples."""

    def __init__(self, output: LayerOutput, batch: list[Tensor | None], num_examples: int) -> None:
        present = [grad for grad in batch if grad is not None]
        if not all(bool(grad.isfinite().all()) for grad in present):
            raise NotFiniteError
        self.output, self.batch = output, batch
        self.is_reached, self.has_gradient = bool(present), any(bool(grad.any()) for grad in present)
        self.is_first = not any(map(comes_after_layer, output.sources))
        self.fitting = output.possible_layouts(num_examples) if self.has_gradient else []

    def keep_fitting(self, grads: Sequence[Tensor | None], chosen: Tensor) -> None:
        """Drop the layouts that do not fit the gradients of the chosen examples."""
        self.fitting = [layout for layout in self.fitting if self.output.fits(layout, self.batch, grads, chosen)]

    def layout(self, num_examples: int, is_routed: bool) -> Layout | None:
        """The most likely layout; None if the loss does not reach the call."""
        if not self.is_reached:
            return None
        if self.fitting and not is_routed:
            return self.fitting[0]
        is_unknown = not self.has_gradient and not is_routed
        return ROWS if is_unknown and self.output.rows in {0, num_examples} else SHARED
