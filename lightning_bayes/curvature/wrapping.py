"""Engines that measure with our own rules: every measured module's forward is wrapped during a capture.

A wrapped forward runs through the layer's rule, which measures the call in the backward pass (`curvature.layer_calls`).
Engines differ in which calls they measure, and captures in what they keep of a call.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_bayes.curvature.capture import Capture
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.gradient_hooks import changes_refused
from lightning_bayes.curvature.layer_calls import LayerCall
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import MeasuredModule, refuse_scripted
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
        # Generic calls whose sum was compared with the batch gradient: the module, and how its inputs split.
        self.checked: set[tuple[nn.Module, tuple[int | None, ...]]] = set()

    @contextmanager
    def run(self, captured: WrappingCapture) -> Iterator[Capture]:
        """Let `captured` measure the passes inside the context; forwards are wrapped on entry and unwrapped on exit.

        Args:
            captured: An empty capture.

        Yields:
            The capture; its squares are complete on exit.
        """
        units = self.units()
        # A compiler must not trace into the identity below: it would compile away what its backward does.
        call = torch.compiler.disable(captured.call) if "torch._dynamo" in sys.modules else captured.call  # type: ignore[no-untyped-call]
        wrapped: list[nn.Module] = []
        try:
            for unit in units:
                unit.module.forward = _Wrapped(call, unit, unit.module.forward)
                wrapped.append(unit.module)
            with changes_refused(units), self.watching_whole(captured):
                yield captured
        finally:
            captured.forget_nodes()
            for module in wrapped:
                _unwrap(module)
        captured.finish()

    def detaches(self, unit: MeasuredModule, captured: Capture) -> bool:
        """Every unit."""
        return True


class _Wrapped(partial[Any]):
    """A forward that a capture stands in for; a copy of the module, made inside the capture, keeps the bare one."""

    def __reduce__(self) -> Any:
        return _bare, (self.args[1],)


def _bare(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def _unwrap(module: nn.Module) -> None:
    wrapper: Any = module.forward
    original = wrapper.args[1]
    if getattr(original, "__func__", None) is type(module).forward:
        del module.forward  # the class's own method shows again
    else:
        module.forward = original


class WrappingCapture(Capture, ABC):
    """The results of one pass, and the forwards that replace those of the measured modules.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: WrappingEngine) -> None:
        super().__init__(engine.loss_reduction, engine.probe)
        self.engine, self.workspace, self.checked = engine, engine.workspace, engine.checked
        self.calls: Counter[nn.Parameter] = Counter()
        self.shared: dict[nn.Parameter, Tensor] = {}  # Σ over calls of c_i, [B, *shape]
        self.inside_generic = False
        self.passing: MeasuredModule | None = None  # runs as it is, though its children are measured

    def call(self, unit: MeasuredModule, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's forward."""
        if self.inside_generic or unit is self.passing:
            return forward(*args, **kwargs)
        is_measured = torch.is_grad_enabled()
        if not is_measured and not _in_reentrant_checkpoint():
            return forward(*args, **kwargs)
        if is_measured and is_in_functorch():
            raise UnsupportedTrainingError(
                f"{unit.label} is called under a transform of torch.func, where nothing can be measured. Use "
                "torch.autograd.grad on the layer's input instead, or call the model under torch.no_grad()."
            )
        params = {name: p for name, p in unit.named_parameters() if p.requires_grad}
        if not is_in_backward():  # otherwise a checkpoint repeats a call that counts already
            self.calls.update(params.values())
        return self.record(unit, params).run(forward, args, kwargs) if is_measured else forward(*args, **kwargs)

    @abstractmethod
    def record(self, unit: MeasuredModule, params: dict[str, nn.Parameter]) -> LayerCall:
        """The object that measures one call of `unit`.

        Args:
            unit: The module.
            params: Its trained parameters by name.

        Returns:
            The call.
        """

    def takes_call(self, call: LayerCall, inputs: list[Tensor], grads: list[Tensor | None]) -> bool:
        """Whether the capture has taken a call by inputs and output gradients, in place of what its rule makes of them."""
        return False

    def takes_sums(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether sums over the examples suffice for a call's parameters: where no other call uses them."""
        return all(self.calls[param] == 1 for param in params)

    def is_asked(self, accumulators: list[Any]) -> bool:
        """Whether the running backward accumulates into parameters; ``autograd.grad`` of the loss by its inputs does not."""
        return not self.is_following and any(map(will_execute, accumulators))

    def add(self, param: nn.Parameter, square: Tensor) -> None:
        """Keep Σ_i c_i² of a parameter."""
        if param in self.squares:
            raise UnsupportedTrainingError(
                "A second backward reached a parameter whose squares were already taken in this pass. Add the losses "
                "and call backward once, or open one pass for each backward."
            )
        self.squares[param] = square

    def add_shared(self, param: nn.Parameter, contribution: Tensor) -> None:
        """Keep a call's c_i of a parameter that several calls use."""
        known = self.shared.get(param)
        if known is not None and len(known) != len(contribution):
            raise ExampleDimensionError(
                f"A parameter of shape {tuple(param.shape)} is used with {len(known)} and with {len(contribution)} "
                "examples in one pass, so its uses cannot be added example by example."
            )
        self.shared[param] = contribution if known is None else known + contribution

    def finish(self) -> None:
        """Square what several calls shared."""
        for param, contribution in self.shared.items():
            self.add(param, contribution.square().sum(0))
        self.shared.clear()


def _in_reentrant_checkpoint() -> bool:
    """Whether a segment runs without gradients because it is going to be repeated with them."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
