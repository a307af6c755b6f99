"""Captures with this package's rules: hooks on the measured modules, and the check that their contributions add up.

A forward hook records a differentiable call (`curvature.layer_calls`), and a hook on its output measures it in backward.
The contributions of the examples must add up to the gradient that autograd computes:

    Σ_i c_i = ∂L/∂θ

The first pass of each kind compares both, in an additional backward pass or, under a reentrant checkpoint, in the
pass's own. A parameter that fails, because of a use outside of its layer or a rule that does
not fit, is measured by a loop over the examples (`curvature.example_loop`), or is refused by name.
"""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_bayes.curvature.calls_of_parts import mark_parts
from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.forward_state import (
    in_full_precision,
    in_reentrant_checkpoint,
    without_autocast,
)
from lightning_bayes.curvature.gradient_check import RunningCheck, failing_parameters
from lightning_bayes.curvature.layer_calls import GenericCall, LayerCall, RuleCall, Start
from lightning_bayes.curvature.layouts import LOOPED, ROWS, SHARED, LayerOutput
from lightning_bayes.curvature.measured_modules import MeasuredModule, returns_scalars
from lightning_bayes.curvature.model_call import Uncopied
from lightning_bayes.curvature.parameters import user_hooks_off
from lightning_bayes.curvature.single_examples import can_repeat_backward
from lightning_bayes.errors import ExampleDimensionError, UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.private_torch import (
    is_in_backward,
    is_in_functorch,
    will_execute,
)

_HALF = {torch.float16, torch.bfloat16}


class HookedCapture(Capture, ABC):
    """The results of one pass, and the hooks that fill them."""

    def __init__(self, engine: AbstractEngine) -> None:
        super().__init__(engine.loss_reduction, engine.probe)
        self.engine, self.workspace = engine, engine.workspace
        self.calls: Counter[nn.Parameter] = Counter()
        self.shared: dict[nn.Parameter, Tensor] = {}  # Σ over calls of c_i, [B, *shape]
        self.looped: set[nn.Parameter] = set()  # measured by a loop over the examples
        self.sums: dict[nn.Parameter, Tensor] | None = None  # Σ_i c_i, only during the check
        self.running_check: RunningCheck | None = None
        self.is_half = False  # whether some gradient is rounded to half precision
        self._is_measuring = self._is_replaying = False  # whether `measuring_backward` or a rule runs
        self._starts: dict[nn.Module, list[Start]] = {}

    # -- forward ------------------------------------------------------------------------------------------------------

    def watch(self, unit: MeasuredModule, undo: ExitStack) -> None:
        """Register the hooks on a unit until `undo` closes."""
        if unit.rule is None or unit.rule.repeats_noise(unit.module):
            before = Uncopied(self._note_start, unit)
            undo.callback(unit.module.register_forward_pre_hook(before, prepend=True).remove)
        if unit.rule is None and not unit.direct_only:
            mark_parts(unit, lambda: self._is_replaying or bool(self._starts.get(unit.module)), undo)
        after = Uncopied(self._on_forward, unit)
        undo.callback(unit.module.register_forward_hook(after, prepend=True, with_kwargs=True).remove)

    def _note_start(self, unit: MeasuredModule, module: nn.Module, args: Any) -> None:
        start = None if self._is_replaying or not torch.is_grad_enabled() else Start.of(unit)
        if start is not None:
            self._starts.setdefault(module, []).append(start)

    def _on_forward(self, unit: MeasuredModule, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook: record a call. Returns the output, some of it as copies; None leaves it as it is."""
        if self._is_replaying or returns_scalars(unit, output):
            return None
        has_gradients = torch.is_grad_enabled()
        if not has_gradients and not in_reentrant_checkpoint():
            return None
        if has_gradients and is_in_functorch():
            raise UnsupportedTrainingError(
                f"{unit.label} is called under a transform of torch.func, which prevents a measurement. Use "
                "torch.autograd.grad on the layer's input instead, or call the model under torch.no_grad()."
            )
        if not is_in_backward():  # in backward, a checkpoint repeats a call that was counted before
            self.calls.update(p for _, p in unit.named_parameters() if p.requires_grad)
        return self._record(unit, args, kwargs, output) if has_gradients else None

    def _record(self, unit: MeasuredModule, args: Any, kwargs: Any, output: Any) -> Any:
        starts = self._starts.get(unit.module)
        start = starts.pop() if starts else None
        call: LayerCall
        if unit.rule is None:
            assert start is not None
            call = GenericCall(unit, args, kwargs, start, self.workspace, self.engine.checked)
            result = call.watch(output, self._on_gradients)
        else:
            call = RuleCall(unit, args, kwargs, start, self.workspace)
            result = call.watch(output, self._on_gradients)
        self.note_call(unit.label, call.rows)
        if call.output.edges and not is_in_backward():
            self.outputs.append(call.output)
        return result

    # -- backward -----------------------------------------------------------------------------------------------------

    def _on_gradients(self, call: LayerCall, grads: list[Tensor | None]) -> None:
        """Hook on the outputs of a call: measure it, if parameter gradients are computed."""
        present = [grad for grad in grads if grad is not None]
        if not present or not self.should_measure(call.params.values()):
            return
        self.is_half |= any(grad.dtype in _HALF for grad in present)
        inputs = call.inputs  # which may run a checkpoint's forward again
        self._is_replaying = True
        try:
            with torch.no_grad(), without_autocast(present[0].device.type), call.as_in_forward():
                self._measure(call, inputs, [in_full_precision(grad) for grad in grads])
        except UnsupportedLayerError:
            if self.sums is None:
                raise  # otherwise the parameters fail the check
        finally:
            self._is_replaying = False

    def _measure(self, call: LayerCall, inputs: list[Any], grads: list[Tensor | None]) -> None:
        if self.running_check is not None and self._accumulates and not self.has_taken_examples:
            sums = call.sums(inputs, grads)
            for name, param in call.params.items():
                self.running_check.add(param, sums[name][0])
        if self.sums is None and self.handles_call(call, inputs, grads):
            return
        layout, n = call.output.layout, self.known_batch_size or 1
        params = {name: param for name, param in call.params.items() if param not in self.looped}
        if not self.stores or layout == LOOPED or not params:
            return
        call.output.require_loop()
        if layout != ROWS and call.output.takes_positions:
            inputs, grads = call.with_examples_first(inputs, grads, n)
            layout = ROWS
        if layout == ROWS and self.needs_only_sums(params.values()):
            self._add_sums(call, params, inputs, grads)
            return
        contributions = call.by_example(inputs, grads, n, layout)
        for name, param in params.items():
            self._add_sum(param, contributions[name].sum(0))
            self.add_contributions(param, contributions[name])

    def _add_sums(
        self, call: LayerCall, params: dict[str, nn.Parameter], inputs: list[Any], grads: list[Tensor | None]
    ) -> None:
        """Add Σ_i c_i² of a call; also Σ_i c_i during the check, since autograd computes the gradient of all others."""
        sums = {} if self.sums is None else call.sums(inputs, grads)
        squares = {} if sums else call.squares(inputs, grads)
        for name, param in params.items():
            if sums:
                self._add_sum(param, sums[name][0])
            self.add(param, sums[name][1] if sums else squares[name])

    def handles_call(self, call: LayerCall, inputs: list[Any], grads: list[Tensor | None]) -> bool:
        """Handle a call without its rule, given its inputs and output gradients; returns whether it was handled."""
        return False

    def needs_only_sums(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether sums over the examples suffice for a call's parameters: no other call uses them."""
        return all(self.calls[param] == 1 for param in params)

    @property
    def stores(self) -> bool:
        """Whether the contributions in the running backward are stored."""
        return self._is_measuring or not self.has_taken_examples

    def should_measure(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether the running backward is a `measuring_backward` or accumulates gradients of some of the parameters."""
        if self._is_measuring or self.is_following:
            return self._is_measuring
        return any(will_execute(get_gradient_edge(param).node) for param in params)

    def measuring_backward(
        self, outputs: Tensor, leaves: Iterable[Tensor], column: Tensor | None = None
    ) -> Sequence[Tensor | None]:
        """Run a backward pass that measures, but accumulates no gradients; `column` holds the output gradients."""
        self._is_measuring = True
        try:
            grads = torch.autograd.grad(outputs, list(leaves), column, retain_graph=True, allow_unused=True)
            self.finish()
        finally:
            self._is_measuring = False
        return grads

    def add(self, param: nn.Parameter, square: Tensor) -> None:
        """Store Σ_i c_i² of a parameter."""
        if param in self.squares:
            raise UnsupportedTrainingError(
                "A second backward reached a parameter that was already measured in this pass. Add the losses and call "
                "backward once, or open one pass for each backward."
            )
        self.squares[param] = square

    def add_complete(self, param: nn.Parameter, contributions: Tensor) -> None:
        """Store the squares of the c_i of a parameter, ``[B, *shape]``, summed over all calls."""
        self.add(param, contributions.square().sum(0))

    def add_contributions(self, param: nn.Parameter, contribution: Tensor) -> None:
        """Add the c_i of one call, ``[B, *shape]``, to the c_i of the other calls that use the parameter."""
        if self.calls[param] == 1:
            self.add_complete(param, contribution)
            return
        total = self.shared.get(param)
        if total is not None and len(total) != len(contribution):
            raise ExampleDimensionError(
                f"A parameter of shape {tuple(param.shape)} is used with {len(total)} and with {len(contribution)} "
                "examples in one pass, so its contributions cannot be added example by example. Use the same examples in "
                "every call, or freeze the parameter with requires_grad_(False)."
            )
        self.shared[param] = contribution if total is None else total + contribution

    def finish(self) -> None:
        """Complete the contributions of parameters that several calls use."""
        for param, contribution in self.shared.items():
            self.add_complete(param, contribution)
        self.shared.clear()

    @property
    def _accumulates(self) -> bool:
        """Whether the running backward accumulates gradients."""
        return not self._is_measuring and not self.is_following

    # -- the check ----------------------------------------------------------------------------------------------------

    def _add_sum(self, param: nn.Parameter, total: Tensor) -> None:
        if self.sums is not None:
            self.sums[param] = self.sums[param] + total if param in self.sums else total

    def handle_layouts(self, loss: Tensor, outputs: Sequence[LayerOutput]) -> None:
        """Check the calls in the first pass of a kind; loop over the examples for parameters that fail."""
        shared = {
            p for out in outputs if out.layout == SHARED for _, p in out.unit.named_parameters() if p.requires_grad
        }
        for output in outputs:
            output.layout = LOOPED if output.layout == SHARED else output.layout
        if self.running_check is None and not can_repeat_backward(loss):
            self._start_running_check()
        self.loop(loss, shared | self._failing(loss, shared))

    def loop(self, loss: Tensor, params: set[nn.Parameter]) -> None:
        """Measure parameters whose gradient no rule can split into examples."""
        self.unmeasured |= params

    def _failing(self, loss: Tensor, known: set[nn.Parameter]) -> set[nn.Parameter]:
        """The parameters, apart from `known` ones, that fail the check; it runs once for each kind of pass."""
        kind, checked = self.layouts.kind, self.engine.probe.failing
        params = [param for param in self.engine.trained().values() if param not in known]
        if kind in checked or not params or self.is_empty or not can_repeat_backward(loss):
            return checked.get(kind, set())
        squares, self.squares, self.sums = self.squares, {}, {}
        try:
            with self.left_alone(), user_hooks_off(params):
                grads = zip(params, self.measuring_backward(loss, params), strict=True)
            sums, found = self.sums, self.squares
        finally:
            self.squares, self.sums = squares, None
            self.shared.clear()
        of_loss = {param: grad for param, grad in grads if grad is not None}
        failing = failing_parameters(sums, found, of_loss, partial(self._constant, loss), self.is_half)
        if failing is not None and kind is not None:
            checked[kind] = failing
        return failing or set()

    def _start_running_check(self) -> None:
        """Check the backward that follows, if no pass with these calls was checked."""
        if tuple(self.sizes) not in self.engine.checked_once and not self.is_empty:
            self.running_check = RunningCheck(self.engine.trained().values(), lambda: self._accumulates)

    def finish_check(self) -> None:
        """Raise `UnsupportedLayerError` for parameters that fail a `RunningCheck`."""
        check = self.running_check
        if check is not None and check.passes(self.engine.trained(), self.squares, self.is_half):
            self.engine.checked_once.add(tuple(self.sizes))

    def _constant(self, loss: Tensor, params: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The gradients of the terms of a loss that depend on no example."""
        examples = self.single_examples(loss, params) if params else None
        if examples is None:
            return {}
        with self.following(), user_hooks_off(params), examples.separated() as gradients:
            grads = gradients(torch.zeros(examples.num_examples, dtype=torch.bool))
        return {param: grad for param, grad in zip(params, grads, strict=True) if grad is not None}
