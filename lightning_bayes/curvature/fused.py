"""The fused engine: the parameter gradient and the per-example squares from one computation.

Inside a capture every measured module runs on **detached** parameters, so autograd does not compute their gradient. An
identity `autograd.Function` behind the module's output passes the output's gradient to the module's rule, returns Σ_i c_i to
autograd as the parameters' gradient and keeps Σ_i c_i².

A parameter that several calls use in one pass (a shared module, tied weights, a recomputed checkpoint) needs the sum over
its calls per example *before* the square: its contributions are kept until the pass ends.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_bayes.curvature.engine import AbstractEngine, Capture
from lightning_bayes.curvature.gradient_hooks import changes_refused
from lightning_bayes.curvature.loss import LossReduction
from lightning_bayes.curvature.measured_modules import (
    MeasuredModule,
    refuse_scripted,
    refuse_sequence_first,
)
from lightning_bayes.curvature.measured_output import MeasuredOutput, replay_errors_named
from lightning_bayes.curvature.rules.generic import ReplayedCall
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import rng_state, with_rng
from lightning_bayes.curvature.rules.registry import LayerRule, Sums
from lightning_bayes.curvature.workspace import DEFAULT_MIB, Workspace
from lightning_bayes.errors import ExampleDimensionError, UnsupportedTrainingError
from lightning_bayes.private_torch import (
    has_children,
    is_in_backward,
    is_in_functorch,
    is_view,
    own_parameters,
    saved_by,
    will_execute,
)


class FusedEngine(AbstractEngine):
    """Measures with our own rules; the default engine. Arguments as in `AbstractEngine`."""

    def __init__(
        self, model: nn.Module, loss_reduction: LossReduction = "auto", workspace_mib: float = DEFAULT_MIB
    ) -> None:
        super().__init__(model, loss_reduction, workspace_mib)
        refuse_scripted(model)
        refuse_sequence_first(model)
        # Generic calls whose sum was compared with the batch gradient: the module, and how its inputs split.
        self.checked: set[tuple[nn.Module, tuple[int | None, ...]]] = set()

    def capture(self) -> AbstractContextManager[Capture]:
        """Measure the passes inside the context; see `AbstractEngine.capture`."""
        return self.run(FusedCapture(self.loss_reduction, self.checked, self.workspace))

    @contextmanager
    def run(self, captured: FusedCapture) -> Iterator[Capture]:
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
            with changes_refused(units):
                yield captured
        finally:
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


class FusedCapture(Capture):
    """The results of one pass, and the forwards that replace those of the measured modules.

    Args:
        loss_reduction: How the loss reduces its examples.
        checked: Generic calls that were checked already, see `FusedEngine`.
        workspace: Memory of the rules.
    """

    def __init__(
        self,
        loss_reduction: LossReduction,
        checked: set[tuple[nn.Module, tuple[int | None, ...]]],
        workspace: Workspace,
    ) -> None:
        super().__init__(loss_reduction)
        self.workspace = workspace
        self.calls: Counter[nn.Parameter] = Counter()
        self.shared: dict[nn.Parameter, Tensor] = {}  # Σ over calls of c_i, [B, *shape]
        self.checked = checked
        self.inside_generic = False

    def call(self, unit: MeasuredModule, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's forward."""
        if self.inside_generic:
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

    def record(self, unit: MeasuredModule, params: dict[str, nn.Parameter]) -> LayerCall:
        """The object that measures one call of `unit`."""
        return (_RuleCall if unit.rule is not None else _GenericCall)(self, unit, params)

    def takes_sums(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether sums over the examples suffice for a call's parameters: where no other call uses them."""
        return all(self.calls[param] == 1 for param in params)

    def is_asked(self, accumulators: list[Any]) -> bool:
        """Whether the running backward accumulates into parameters; ``autograd.grad`` of the loss by its inputs does not."""
        return any(map(will_execute, accumulators))

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


def _is_needed(output: Tensor) -> bool:
    """Whether a custom function may not mark `output` as changed in place: a view, or saved for its own backward."""
    return is_view(output) or saved_by(output.grad_fn, "result") is not None


class LayerCall(ABC):
    """One call of a unit."""

    def __init__(self, captured: FusedCapture, unit: MeasuredModule, params: dict[str, nn.Parameter]) -> None:
        self.captured, self.unit, self.params = captured, unit, params
        modules = unit.module.modules() if has_children(unit.module) else [unit.module]
        self.modes = [(module, module.training) for module in modules]  # those of the forward, for the backward

    @abstractmethod
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The unit's output, measured in the backward pass."""

    @abstractmethod
    def backward(self, inputs: list[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Measure the call; returns the leaves' gradients."""

    @property
    def rule(self) -> LayerRule:
        """The unit's rule."""
        assert self.unit.rule is not None
        return self.unit.rule

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The rule's inputs, whose number of examples is noted."""
        inputs = self.rule.bind(self.unit.module, args, kwargs)
        self.unit.require_examples(inputs[0])
        self.captured.note_call(self.unit.label, self.rule.num_examples(self.unit.module, inputs))
        return list(inputs)

    def watched(self, inputs: list[Any], output: Any, leaves: list[Any]) -> Any:
        """`output` with an identity behind it, whose backward asks `backward` for the gradients of `leaves`."""
        if isinstance(output, Tensor) and self.unit.rule is not None:
            return MeasuredOutput.apply(self, inputs, 1, output.clone() if _is_needed(output) else output, *leaves)
        tensors, rebuild = differentiable(output)
        outputs = [t.clone() for t in tensors]  # outputs may be views of one another
        measured = MeasuredOutput.apply(self, inputs, len(outputs), *outputs, *leaves)
        return rebuild([measured] if isinstance(measured, Tensor) else list(measured))

    def is_asked(self, accumulators: list[Any]) -> bool:
        """Whether the running backward asks for `backward`; `accumulators` are the graph's nodes of the leaves."""
        return self.captured.is_asked(accumulators)

    def keep(self, param: nn.Parameter, grad: Tensor, square: Tensor) -> Tensor:
        """Keep the square of a parameter that this call alone uses; returns its gradient."""
        self.captured.add(param, square)
        return grad.to(param.dtype)

    def share(self, param: nn.Parameter, contribution: Tensor) -> Tensor:
        """Keep the contribution to a parameter that several calls use; returns its gradient."""
        grad = contribution.sum(0).to(param.dtype)
        self.captured.add_shared(param, contribution)
        return grad


class _RuleCall(LayerCall):
    """One call of a unit that has a rule."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.unit.module
        inputs = self.note_inputs(args, kwargs)
        self.rng = rng_state() if self.rule.repeats_noise(module) else None
        with _detached_parameters(module):
            output = forward(*args, **kwargs)
        self.saved = self.rule.saved(module, output)
        return self.watched(inputs, output, list(self.params.values()))

    def backward(self, inputs: list[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        module, call = self.unit.module, tuple(in_full_precision(value) for value in inputs)
        each = tuple(in_full_precision(grad) for grad in grads)
        grad_output = each[0] if len(each) == 1 else each
        if self.captured.takes_sums(self.params.values()):
            totals = with_rng(self.rng, self.rule.sums, module, call, grad_output, self.captured.workspace, self.saved)
            return [self.keep(p, *totals[name]) for name, p in self.params.items()]
        contributions = with_rng(self.rng, self.rule, module, call, grad_output)
        return [self.share(p, contributions[name]) for name, p in self.params.items()]


class _GenericCall(LayerCall):
    """One call of a unit without a rule, and of everything below it."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.one_call = ReplayedCall(self.unit.module, args, kwargs, self.captured.workspace)
        self.detached = {name: p.detach() for name, p in self.unit.module.named_parameters()}
        with self._alone():
            output = self.one_call.forward(self.detached, self._is_checked)
        self.captured.note_call(self.unit.label, self.one_call.inputs.batch_size)
        return self.watched(self.one_call.inputs.leaves, output, list(self.params.values()))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.captured.inside_generic = True
        try:
            yield
        finally:
            self.captured.inside_generic = False

    def backward(self, inputs: list[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        self.one_call.inputs.leaves = [in_full_precision(x) for x in inputs]
        grads = [in_full_precision(grad) for grad in grads]
        self.one_call.buffers = {name: in_full_precision(b) for name, b in self.one_call.buffers.items()}
        self.one_call.frozen = {name: in_full_precision(p) for name, p in self.detached.items()}
        trained = {name: self.one_call.frozen.pop(name) for name in self.params}
        # Gradients on, as in a forward: oneDNN's LSTM keeps nothing for its backward otherwise.
        with replay_errors_named(self.unit.label), self._alone(), torch.enable_grad():
            if self.captured.takes_sums(self.params.values()):
                totals = self.one_call.sums(trained, grads)
                self._check_once(trained, grads, lambda: totals)
                return [self.keep(p, *totals[name]) for name, p in self.params.items()]
            contributions = self.one_call.per_example(trained, grads)
            self._check_once(
                trained, grads, lambda: {k: (c.sum(0), c.square().sum(0)) for k, c in contributions.items()}
            )
            return [self.share(p, contributions[name]) for name, p in self.params.items()]

    @property
    def _key(self) -> tuple[nn.Module, tuple[int | None, ...]]:
        """A mask of as many rows as the batch has examples is split like them; so once for each way of splitting."""
        return self.unit.module, self.one_call.inputs.dims

    def _is_checked(self) -> bool:
        return self._key in self.captured.checked

    def _check_once(self, params: dict[str, Tensor], grads: list[Tensor | None], found: Callable[[], Sums]) -> None:
        if not self._is_checked() and all(grad.isfinite().all() for grad, _ in found().values()):
            self.one_call.check_sum(params, grads, found())
            if self.one_call.inputs.batch_size > 1:  # one example mixes with no other
                self.captured.checked.add(self._key)


@contextmanager
def _detached_parameters(module: nn.Module) -> Iterator[None]:
    """Let `module` and its children compute with detached parameters."""
    holders = [module] if not has_children(module) else [m for m in module.modules() if own_parameters(m)]
    own: list[dict[str, Any]] = [dict(own_parameters(holder)) for holder in holders]
    try:
        for holder, params in zip(holders, own, strict=True):
            own_parameters(holder).update({name: p if p is None else p.detach() for name, p in params.items()})
        yield
    finally:
        for holder, params in zip(holders, own, strict=True):
            own_parameters(holder).update(params)


def in_full_precision(value: Any) -> Any:
    """Half precision cannot hold squares of gradients: 1e-4² is below its smallest number."""
    is_half = isinstance(value, Tensor) and value.dtype in {torch.float16, torch.bfloat16}
    return value.float() if is_half else value
