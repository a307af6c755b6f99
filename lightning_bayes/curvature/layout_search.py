"""Search for the layouts of one pass, by backward passes from the losses of single examples.

The sizes of a layer's tensors can mislead: a table may have as many positions as the batch has examples, or a block may be
sequence-first. So the search runs backward from the loss of a single example, for two examples or more. The output
gradients of the layers show where the example is (`layouts`). These backward passes stop at the outputs of layers.

The number of examples n is one of the sizes that layers see. The number of rows in a call of the whole model takes
precedence if it is consistent; otherwise n is the number for which most calls have their examples in rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_bayes.curvature.example_dims import ORDERS, Order
from lightning_bayes.curvature.example_rows import ExampleRows, example_rows
from lightning_bayes.curvature.layouts import REGROUPED, ROWS, SHARED, LayerOutput, Layout, entries
from lightning_bayes.curvature.loss_recorder import LossRecorder
from lightning_bayes.curvature.parameter_uses import enters_measured_layer
from lightning_bayes.curvature.routing import one_at_a_time, routed_calls
from lightning_bayes.curvature.single_examples import SingleExamples, can_repeat_backward
from lightning_bayes.private_torch import is_alive

_MAX_MORE = 8  # examples followed after the first two, if some call gets no gradient from these


@dataclass(frozen=True)
class PassLayouts:
    """Where the calls of one pass hold the examples."""

    num_examples: int  # n
    layouts: tuple[Layout | None, ...]  # of each call; None for a call that the loss does not reach
    order: Order = "rows"  # how the values that the loss reduces hold the examples
    is_settled: bool = True  # whether later passes of this kind may reuse the layouts
    is_recorded: bool = True  # see `ExampleRows`
    error: str = ""  # why the examples cannot be separated; empty if they can
    kind: Any = None  # of the pass, see `ExampleProbe`

    @property
    def score(self) -> tuple[int, int]:
        """Number of calls whose examples are not in rows, and how many of these have a shared output. Lower is better."""
        not_rows = [layout for layout in self.layouts if layout is not None and layout != ROWS]
        return len(not_rows), not_rows.count(SHARED)


class ModelCall(NamedTuple):
    """A call of the whole model whose first input and first output have equally many rows."""

    rows: int
    edge: GradientEdge  # of the output


class NotFiniteError(Exception):
    """A gradient of a single example is not finite."""


@dataclass(frozen=True)
class LayoutSearch:
    """The search for the layouts of one pass."""

    loss: Tensor  # before backward
    outputs: Sequence[LayerOutput]  # of the calls, in order
    model_call: ModelCall | None  # the call of the whole model, if there is one
    recorder: LossRecorder
    num_losses: int = 0  # number of explicit per-example losses, each of which may depend on all rows

    @cached_property
    def sizes(self) -> list[int]:
        """All sizes of the pass, in a fixed order."""
        of_outputs = (size for out in self.outputs for shape in ((out.rows,), *out.shapes) for size in shape)
        return [self.num_losses, self._model_rows, *of_outputs]

    @property
    def _model_rows(self) -> int:
        return 0 if self.model_call is None else self.model_call.rows

    def run(self) -> PassLayouts | None:
        """The layouts for the best number of examples that the sizes allow; None if no backward can follow examples."""
        rows = {out.rows for out in self.outputs if out.rows}
        candidates = {self.num_losses} if self.num_losses else {*rows, self._model_rows} - {0}
        if candidates == {1}:
            return self._one_example(one_at_a_time(self.loss, self.outputs))
        if not can_repeat_backward(self.loss):
            return None
        attempts = [result for n in sorted(candidates - {1}, reverse=True) for result in self._attempts(n)]
        feasible = [result for result in attempts if not result.error]
        if not self.num_losses and not any(result.is_recorded for result in feasible):
            feasible = self._with_fewer(rows) or feasible
        of_model = [result for result in feasible if result.num_examples == self._model_rows]
        if feasible:
            return min(of_model or feasible, key=lambda result: result.score)
        if self.num_losses:
            return self._all_shared()
        if 1 in rows and not attempts:  # the loss fits no other number
            return self._one_example()
        return attempts[0] if attempts and len(rows) == 1 else None  # an error

    def _attempts(self, n: int) -> Iterator[PassLayouts]:
        """Yield layouts for n examples, or the error that these mix; yield nothing if the loss does not fit."""
        tried: list[dict[Any, int]] = []
        for order in ORDERS:
            rows = example_rows(self.recorder, self.loss, n, order)
            if rows is None or rows.outer in tried:
                continue
            tried.append(rows.outer)
            result = self._followed(rows)
            yield result
            if not result.error and not any(result.score):
                return

    def _followed(self, rows: ExampleRows) -> PassLayouts:
        """The layouts that fit all followed examples, or the error that these mix."""
        n, model = rows.num_examples, self.model_call
        model_output = [model.edge] if model is not None and model.rows == n and is_alive(model.edge.node) else []
        examples = SingleExamples(self.loss, rows, self.outputs, model_output)
        calls = [_Call(*pair) for pair in zip(self.outputs, examples.batch_gradients().calls, strict=True)]
        more = [0, n // 4, *(example for call in calls for example in call.first_example(n))]
        with examples.separated() as gradients:
            for count, example in enumerate(dict.fromkeys((n - 1, (n - 1) // 2, *more[:_MAX_MORE]))):
                if count > 1 and all(call.is_settled for call in calls):
                    break
                grads = gradients(example)
                if any(grad is not None and not entries(grad, 0) <= {example} for grad in grads.others):
                    return self._mixed(n)
                for call, output_grads in zip(calls, grads.calls, strict=True):
                    call.follow(output_grads, example, n)
        if not _is_anchored(calls, n):
            return self._mixed(n)
        is_settled = all(call.is_settled for call in calls)
        for index in routed_calls(self.loss, self.outputs):
            calls[index].fitting = []
        layouts = tuple(call.layout(n) for call in calls)
        return PassLayouts(n, layouts, rows.order, is_settled, rows.is_recorded)

    def _with_fewer(self, rows: set[int]) -> list[PassLayouts]:
        """Layouts for fewer examples than any layer has rows, if several rows of every layer make up one example."""
        for n in sorted(set(self.recorder.sizes(self.loss)), reverse=True):
            if n < 2 or any(size <= n or size % n for size in rows):
                continue
            for result in self._attempts(n):
                kinds = {layout.kind for layout in result.layouts if layout is not None}
                if result.is_recorded and not result.error and kinds.issubset(REGROUPED):
                    return [result]
        return []

    def _one_example(self, error: str = "") -> PassLayouts:
        """The layouts for a batch of one example, to which all rows of a call belong."""
        layouts = tuple(ROWS if out.rows == 1 else Layout("groups") for out in self.outputs)
        return PassLayouts(1, layouts, error=error)

    def _all_shared(self) -> PassLayouts:
        """The layouts for per-example losses that may depend on all rows."""
        grads = SingleExamples(self.loss, None, self.outputs).batch_gradients().calls
        return PassLayouts(self.num_losses, tuple(SHARED if _is_reached(each) else None for each in grads))

    def _mixed(self, num_examples: int) -> PassLayouts:
        """The error for examples that a layer mixes."""
        first = self.outputs[0]
        error = (
            f"{first.unit.label} does not keep the examples apart: the loss of one example depends on other rows of its "
            f"output of shape {list(first.shapes[0])}. Keep the {first.rows} examples of the batch in dimension 0 of every "
            "layer's input, without operations that mix them, freeze the layer, or return the per-example losses as well: "
            '{"loss": loss, "per_example_loss": losses}.'
        )
        return PassLayouts(num_examples, (None,) * len(self.outputs), error=error)


class _Call:
    """A call of the pass, and the layouts that fit the gradients of the followed examples."""

    def __init__(self, output: LayerOutput, batch_grads: list[Tensor | None]) -> None:
        self.output, self.batch_grads = output, batch_grads
        self.is_reached = _is_reached(batch_grads)
        self.fitting: list[Layout] | None = None  # None if no followed example has a gradient

    @property
    def is_settled(self) -> bool:
        """Whether some followed example has a gradient, or none can have one."""
        return self.fitting is not None or not self.is_reached

    def follow(self, grads: list[Tensor | None], example: int, num_examples: int) -> None:
        """Drop the layouts that do not fit the gradients of an example's loss."""
        if not all(bool(grad.isfinite().all()) for grad in grads if grad is not None):
            raise NotFiniteError
        layouts = self.output.layouts(grads, example, num_examples)
        if layouts is not None:
            self.fitting = [layout for layout in layouts if self.fitting is None or layout in self.fitting]

    def first_example(self, num_examples: int) -> list[int]:
        """The first example with a gradient, if the rows seem to be the examples."""
        grad, dim = self.batch_grads[0], self.output.dim
        if grad is None or self.output.rows != num_examples or dim is None:
            return []
        return sorted(entries(grad, dim))[:1]

    def layout(self, num_examples: int) -> Layout | None:
        """The most likely layout; None if the loss does not reach the call."""
        if not self.is_reached:
            return None
        if self.fitting is not None:
            return self.fitting[0] if self.fitting else SHARED
        has_gradient = any(grad is not None and bool(grad.any()) for grad in self.batch_grads)
        rows = self.output.rows
        return ROWS if not rows or (rows == num_examples and not has_gradient) else SHARED


def _is_anchored(calls: Sequence[_Call], n: int) -> bool:
    """Whether examples are separate in some first layer of the model. True if no first layer has a gradient."""
    # A first layer without a dimension that could hold the examples is a table that they share.
    of_first_layers = [
        call.fitting
        for call in calls
        if call.fitting is not None and call.output.may_hold(n) and _is_first(call.output)
    ]
    return any(of_first_layers) or not of_first_layers


def _is_first(output: LayerOutput) -> bool:
    """Whether no measured layer comes before this call."""
    return not any(map(enters_measured_layer, output.sources))


def _is_reached(grads: Sequence[Tensor | None]) -> bool:
    """Whether the loss depends on a call, given the gradients of its outputs."""
    return any(grad is not None for grad in grads)
