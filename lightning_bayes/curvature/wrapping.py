"""Base classes of engines with this package's rules: a capture wraps the forward of every measured module.

A wrapped forward records the call (`curvature.layer_calls`), and the layer's rule measures it during the backward pass.
Subclasses choose which calls they measure and what they store.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.layer_calls import GenericCall, LayerCall, RuleCall
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import MeasuredModule, refuse_scripted
from lightning_bayes.curvature.parameters import changes_refused
from lightning_bayes.curvature.rules.replayed_call import Checked
from lightning_bayes.curvature.workspace import DEFAULT_MIB
from lightning_bayes.errors import ExampleDimensionError, UnsupportedTrainingError
from lightning_bayes.private_torch import is_in_backward, is_in_functorch, will_execute


class WrappingEngine(AbstractEngine, ABC):
    """Wraps the forwards of measured modules during a capture. Arguments as in `AbstractEngine`."""

    def __init__(
        self, model: nn.Module, loss_reduction: LossReduction = "auto", workspace_mib: float = DEFAULT_MIB
    ) -> None:
        super().__init__(model, loss_reduction, workspace_mib)
        refuse_scripted(model)
        self.checked: Checked = set()

    @contextmanager
    def run(self, captured: WrappingCapture) -> Iterator[Capture]:
        """Measure the passes inside the context with an empty capture; its squares are complete on exit."""
        units = self.units()
        # The compiler must not trace the identity behind a layer's output: it would drop the side effects of its backward.
        call = torch.compiler.disable(captured.call) if "torch._dynamo" in sys.modules else captured.call  # type: ignore[no-untyped-call]
        with ExitStack() as undo:
            for unit in units:
                undo.callback(_restore_forward, unit.module, vars(unit.module).get("forward"))
                unit.module.forward = _Wrapped(call, unit, unit.module.forward)
            undo.enter_context(changes_refused(units))
            undo.enter_context(self.watching_model_call(captured, units))
            yield captured
        captured.finish()


class _Wrapped(partial[Any]):
    """A wrapped forward. A copy of the module made inside a capture gets the original forward back."""

    def __reduce__(self) -> Any:
        return _bare, (self.args[1],)


def _bare(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _restore_forward(module: nn.Module, own_forward: Callable[..., Any] | None) -> None:
    """Restore the forward of a module that may have one of its own instead of the method of its class."""
    del module.forward
    if own_forward is not None:
        module.forward = own_forward


class WrappingCapture(Capture, ABC):
    """The results of one pass, and the replacement for the forwards of measured modules."""

    def __init__(self, engine: WrappingEngine) -> None:
        super().__init__(engine.loss_reduction, engine.probe)
        self.engine, self.workspace, self.checked = engine, engine.workspace, engine.checked
        self.calls: Counter[nn.Parameter] = Counter()
        self.shared: dict[nn.Parameter, Tensor] = {}  # Σ over calls of c_i, [B, *shape]
        self._is_measuring = False  # whether `measuring_backward` runs
        self._is_unwrapped: Callable[[MeasuredModule], bool] = lambda unit: False

    def call(self, unit: MeasuredModule, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The replacement for a module's forward."""
        if self._is_unwrapped(unit):
            return forward(*args, **kwargs)
        has_gradients = torch.is_grad_enabled()
        if not has_gradients and not _in_reentrant_checkpoint():
            return forward(*args, **kwargs)
        if has_gradients and is_in_functorch():
            raise UnsupportedTrainingError(
                f"{unit.label} is called under a transform of torch.func, which prevents a measurement. Use "
                "torch.autograd.grad on the layer's input instead, or call the model under torch.no_grad()."
            )
        params = {name: p for name, p in unit.named_parameters() if p.requires_grad}
        if not is_in_backward():  # in backward, a checkpoint repeats a call that was counted before
            self.calls.update(params.values())
        return self.record(unit, params).run(forward, args, kwargs) if has_gradients else forward(*args, **kwargs)

    @contextmanager
    def unwrapped(self, is_unwrapped: Callable[[MeasuredModule], bool]) -> Iterator[None]:
        """Run the original forwards of some units inside the context."""
        outer, self._is_unwrapped = self._is_unwrapped, is_unwrapped
        try:
            yield
        finally:
            self._is_unwrapped = outer

    def record(self, unit: MeasuredModule, params: dict[str, nn.Parameter]) -> LayerCall:
        """The object that measures one call of `unit` with these trainable parameters."""
        return (GenericCall if unit.rule is None else RuleCall)(self, unit, params)

    def handles_call(self, call: LayerCall, inputs: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Handle a call without its rule, given its inputs and output gradients; returns whether it was handled."""
        return False

    def needs_only_sums(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether sums over the examples suffice for a call's parameters: no other call uses them."""
        return all(self.calls[param] == 1 for param in params)

    @property
    def stores(self) -> bool:
        """Whether the contributions in the running backward are stored; otherwise only gradients are computed."""
        return self._is_measuring or not self.has_taken_examples

    def should_measure(self, accumulators: list[Any]) -> bool:
        """Whether the running backward is a `measuring_backward` or accumulates parameter gradients."""
        return self._is_measuring or (not self.is_following and any(map(will_execute, accumulators)))

    def measuring_backward(self, outputs: Tensor, leaves: Iterable[Tensor], column: Tensor | None = None) -> None:
        """Run a backward pass that measures, but accumulates no gradients; `column` holds the output gradients."""
        self._is_measuring = True
        try:
            torch.autograd.grad(outputs, list(leaves), column, retain_graph=True, allow_unused=True)
            self.finish()
        finally:
            self._is_measuring = False

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


def _in_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs this segment without gradients, to repeat it in backward."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
