"""Captures with this package's rules: hooks on the measured modules, and the check that their contributions add up.

A forward hook records a differentiable call (`curvature.layer_calls`), and a hook on its output measures it in backward.
The contributions of the examples must add up to the gradient that autograd computes:

    Σ_i c_i = ∂L/∂θ

The first pass of each kind that gives a parameter a gradient compares both, in an additional backward pass or, under a
reentrant checkpoint, in the pass's own. A parameter that fails, because of a use outside of its layer or a rule that does
not fit, is measured by a loop over the examples (`curvature.fused`), or is refused by name.
"""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.checkpointing import in_checkpoint, in_reentrant_checkpoint
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.gradient_check import ByParameter, CheckedParameters, RunningCheck, failing_parameters
from lightning_bayes.curvature.layer_calls import (
    GenericCall,
    LayerCall,
    RuleCall,
    Start,
    as_in_forward,
    in_full_precision,
)
from lightning_bayes.curvature.layer_graph import can_repeat_backward
from lightning_bayes.curvature.layouts import LOOPED, ROWS, SHARED, LayerOutput, added_up, with_other_calls
from lightning_bayes.curvature.measured_modules import MeasuredModule, has_only_scalars, mark_parts, refuse_unmeasured
from lightning_bayes.curvature.parameters import buffers_kept, user_hooks_off
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError
from lightning_bayes.likelihood.module_outputs import Uncopied
from lightning_bayes.private_torch import is_in_backward, is_in_functorch, will_execute


class HookedCapture(Capture, ABC):
    """The results of one pass, and the hooks that fill them.

    Class attributes:
        handle_call: Handles a call without its rule, given its inputs and output gradients; returns whether it was handled.
        needs_examples: Whether the contribution of each example is needed, not only the sums.
        can_loop: Whether parameters that no rule covers are measured by a loop over the examples.
        at_operations: Whether parameters outside layers are measured at the functions that take them (`operands`).
    """

    handle_call: Callable[..., bool] | None = None
    needs_examples: ClassVar[bool] = False
    can_loop: bool = False
    at_operations: ClassVar[bool] = False

    def __init__(self, engine: AbstractEngine, left_out: Collection[nn.Parameter] = ()) -> None:
        super().__init__(engine.loss_reduction, engine.plans.plan(left_out, self.at_operations))
        self.engine, self.left_out = engine, left_out
        self.calls: Counter[nn.Parameter] = Counter()
        self.shared: dict[nn.Parameter, Tensor] = {}  # Σ over calls of c_i, [B, *shape]
        self.looped: set[nn.Parameter] = set()  # measured by a loop over the examples
        self.without_gradient: set[nn.Parameter] = set()  # no rule covers them, and their gradient is zero in this pass
        self.sums: dict[nn.Parameter, Tensor] | None = None  # Σ_i c_i, only during the check
        self.running_check: RunningCheck | None = None
        of_step = (unit for unit in self.plan.units if unit.at_operations and hasattr(unit.module, "training_step"))
        self.of_step = {p for unit in of_step for p in unit.params.values()}  # whose terms of the loss are no penalties
        self.is_replanned = False  # whether some modules are measured as a whole from the next pass on
        self.is_half = False  # whether some gradient is rounded to half precision
        self._is_measuring = self._is_replaying = False  # whether `measuring_backward` or a rule runs
        self._starts: dict[nn.Module, list[Start]] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """A segment under checkpointing runs again in each of these backward passes."""
        with super().following(), buffers_kept(self.engine.model):
            yield

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
        if not self._is_replaying and torch.is_grad_enabled() and (not unit.at_operations or in_checkpoint()):
            self._starts.setdefault(module, []).append(Start.of(unit))

    def _on_forward(self, unit: MeasuredModule, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Forward hook: record a call. Returns the output, some of it as copies; None leaves it as it is."""
        is_left = unit.rule is None and (has_only_scalars(output) or (unit.at_operations and not in_checkpoint()))
        if self._is_replaying or is_left:
            return None
        if not torch.is_grad_enabled():
            if not is_in_backward() and in_reentrant_checkpoint():
                self.has_reentrant = True
                self.calls.update(p for p in unit.params.values() if p.requires_grad)
            return None
        if is_in_functorch():
            raise UnsupportedTrainingError(
                f"{unit.label} is called under a transform of torch.func, which prevents a measurement. Use "
                "torch.autograd.grad on the layer's input instead, or call the model under torch.no_grad()."
            )
        start = starts.pop() if (starts := self._starts.get(module)) else None
        kind = GenericCall if unit.rule is None else RuleCall
        return self.recorded(kind(unit, args, kwargs, output, start, self.engine, self.on_gradients))

    def recorded(self, call: LayerCall) -> Any:
        """Record a call, and return its output."""
        self.sizes.setdefault(call.unit.label, set()).add(call.rows)
        if not is_in_backward():  # otherwise a checkpoint repeats the call
            self.calls.update(call.params.values())
            if call.output.edges:
                self.outputs.append(call.output)
        result = call.result
        del call.result  # which refers to the call by its hook, and would stay in memory
        return result

    def on_gradients(self, call: LayerCall, grads: Sequence[Tensor | None]) -> None:
        """Hook on the outputs of a call: measure it, if parameter gradients are computed."""
        present = [grad for grad in grads if grad is not None]
        if not present or not self.should_measure(call.params.values()):
            return
        self.is_half |= any(grad.element_size() < 4 for grad in present)
        inputs = call.inputs  # which may run a checkpoint's forward again
        changed, device = [m for m, training in call.modes if m.training != training], present[0].device.type
        is_alike = not changed and not torch.is_autocast_enabled(device)
        self._is_replaying = True
        try:
            with torch.no_grad(), nullcontext() if is_alike else as_in_forward(changed, device):
                self._measure(call, inputs, [in_full_precision(grad) for grad in grads])
        except UnsupportedLayerError:
            if self.sums is None:
                raise  # otherwise the parameters fail the check
        finally:
            self._is_replaying = False

    def _measure(self, call: LayerCall, inputs: list[Any], grads: list[Tensor | None]) -> None:
        if self.running_check is not None and self.running_check.is_counted():
            sums = call.measured("sums", inputs, grads)
            for name, param in call.params.items():
                self.running_check.add(param, sums[name][0])
        if self.sums is None and self.handle_call is not None and self.handle_call(call, inputs, grads):
            return
        layout = call.output.layout
        params = {name: param for name, param in call.params.items() if param not in self.looped}
        if not (self._is_measuring or self.stores_backward) or layout == LOOPED or not params:
            return
        if layout == SHARED:
            call.output.refuse_shared()
        if layout != ROWS and call.output.takes_positions:
            inputs, grads = call.with_examples_first(inputs, grads, self.known_batch_size or 1)
            layout = ROWS
        has_one_call = all(self.calls[param] == 1 for param in params.values())
        if layout != ROWS or not has_one_call or (self.needs_examples and self.sums is None):
            of_rows = call.measured("contributions", inputs, grads)
            for name, param in params.items():
                contributions = added_up(of_rows[name], layout, self.known_batch_size or 1)
                if self.sums is not None:
                    self._add_sum(param, contributions.sum(0))
                self.add_contributions(param, contributions)
        else:
            found = call.measured("squares" if self.sums is None else "sums", inputs, grads)
            for name, param in params.items():
                if self.sums is not None:  # otherwise autograd computes them
                    self._add_sum(param, found[name][0])
                self.add(param, found[name] if self.sums is None else found[name][1])

    def should_measure(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether the running backward is a `measuring_backward` or accumulates gradients of some of the parameters."""
        if self._is_measuring or self.is_following:
            return self._is_measuring
        try:
            return any(will_execute(get_gradient_edge(param).node) for param in params)
        except RuntimeError:  # torch.autograd.grad returns the gradient of a parameter to the user
            return False

    def measuring_backward(
        self, outputs: Tensor, leaves: Iterable[Tensor], column: Tensor | None = None
    ) -> Sequence[Tensor | None]:
        """Run a backward pass that measures, but accumulates no gradients; `column` holds the output gradients."""
        self._is_measuring = True
        try:
            with buffers_kept(self.engine.model):
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
                "backward once, take gradients of inputs with torch.autograd.grad, or open one pass for each backward."
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
        self.shared[param] = with_other_calls(self.shared.get(param), contribution)

    def finish(self) -> None:
        """Complete the contributions of parameters that several calls use."""
        for param, contribution in self.shared.items():
            self.add_complete(param, contribution)
        self.shared.clear()

    def _add_sum(self, param: nn.Parameter, total: Tensor) -> None:
        assert self.sums is not None
        self.sums[param] = self.sums[param] + total if param in self.sums else total

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of the model that are measured, by name."""
        named = self.engine.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and p not in self.left_out}

    def close(self) -> None:
        """Require of a finished pass that backward measured every parameter with a gradient."""
        moved = {name: p for name, p in self.trained().items() if p.grad is not None}
        reached = {*self.squares, *self.in_factors}
        if self.loss is None and (moved or reached):
            self.require_loss()
        missed = [name for name, param in moved.items() if param not in reached - self.unmeasured]
        if missed or not reached:
            refuse_unmeasured(missed, has_factors=bool(self.in_factors))

    def handle_layouts(self, loss: Tensor, outputs: Sequence[LayerOutput]) -> None:
        """Check the calls; loop over the examples for parameters that fail."""
        shared: set[nn.Parameter] = set()
        for output in outputs:
            if output.layout == SHARED:
                output.layout = LOOPED
                shared.update(param for param in output.unit.params.values() if param.requires_grad)
        checked = CheckedParameters() if (kind := self.layouts.kind) is None else self.plan.probe.checked[kind]
        known = shared | checked.passed | checked.failing
        if new := [param for param in self.trained().values() if param not in known]:
            self._check(loss, new, checked)
        if lost := shared | checked.failing:
            self.is_replanned = self.engine.plans.replan(self.plan, lost, self.calls)
            self.loop(loss, lost)

    def loop(self, loss: Tensor, params: set[nn.Parameter]) -> None:
        """Measure parameters whose gradient no rule can split into examples."""
        self.unmeasured |= params

    def _check(self, loss: Tensor, params: list[nn.Parameter], checked: CheckedParameters) -> None:
        """Check parameters that no pass of this kind has given a gradient before."""
        if self.is_empty:
            return
        if not can_repeat_backward(loss):
            if self.running_check is None and tuple(self.sizes) not in self.plan.checked_once:
                params = list(self.trained().values())
                self.running_check = RunningCheck(params, lambda: not (self._is_measuring or self.is_following))
            return
        sums, squares, grads = self._compared(loss, params)
        failing = failing_parameters(sums, squares, grads, partial(self._constant, loss), self.is_half)
        if failing is not None:
            checked.add(failing, squares, grads)
        # A loop can measure these parameters once they get a gradient; no other method can, so they are refused at once.
        without = grads.keys() - sums.keys() - checked.failing
        (self.without_gradient if self.can_loop else self.unmeasured).update(without)

    def _compared(self, loss: Tensor, params: list[nn.Parameter]) -> tuple[ByParameter, ByParameter, ByParameter]:
        """Σ_i c_i, Σ_i c_i² and the gradients of the parameters that an additional backward pass reaches."""
        kept, self.squares, self.sums = self.squares, {}, {}
        try:
            with self.left_alone(), user_hooks_off(params):
                grads = zip(params, self.measuring_backward(loss, params), strict=True)
            return self.sums, self.squares, {param: grad for param, grad in grads if grad is not None}
        finally:
            self.squares, self.sums = kept, None
            self.shared.clear()

    def _constant(self, loss: Tensor, params: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The gradients of the terms of a loss that depend on no example, which count as penalties."""
        params = [param for param in params if param not in self.of_step]
        examples = self.single_examples(loss, params) if params else None
        if examples is None:
            return {}
        with self.following(), user_hooks_off(params), examples.separated() as gradients:
            grads = gradients(torch.zeros(examples.num_examples, dtype=torch.bool))
        return {param: grad for param, grad in zip(params, grads, strict=True) if grad is not None}
