"""Calls of measured modules, measured by the layer's rule or by the generic rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.layouts import ROWS, SHARED, LayerOutput, Layout, added_up, examples_first, in_groups
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.curvature.measured_output import MeasuredOutput, replay_errors_named
from lightning_bayes.curvature.rules.generic import SingleExamples
from lightning_bayes.curvature.rules.packed import padded_output
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import rng_state, with_rng
from lightning_bayes.curvature.rules.registry import LayerRule, Sums
from lightning_bayes.curvature.rules.stateless import flat_weights
from lightning_bayes.curvature.rules.whole_batch import WholeBatch
from lightning_bayes.private_torch import has_children, is_in_backward, is_view, own_parameters, saved_by

if TYPE_CHECKING:
    from lightning_bayes.curvature.wrapping import WrappingCapture


def _needs_clone(output: Tensor) -> bool:
    """Whether `output` must be cloned before a custom function marks it dirty: it is a view or saved for backward."""
    return is_view(output) or saved_by(output.grad_fn, "result") is not None


class LayerCall(ABC):
    """One call of a unit."""

    def __init__(self, captured: WrappingCapture, unit: MeasuredModule, params: dict[str, nn.Parameter]) -> None:
        self.captured, self.unit, self.params = captured, unit, params
        modules = unit.module.modules() if has_children(unit.module) else [unit.module]
        self.modes = [(module, module.training) for module in modules]  # of the forward pass, to repeat it in backward

    @abstractmethod
    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The unit's output, measured in the backward pass."""

    @abstractmethod
    def backward(self, inputs: list[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Measure the call and return the gradients of the leaves."""

    @property
    def rule(self) -> LayerRule:
        """The unit's rule."""
        assert self.unit.rule is not None
        return self.unit.rule

    def note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The inputs as the rule expects them; records their number of examples."""
        inputs = self.rule.prepare(self.unit.module, self.rule.bind(self.unit.module, args, kwargs))
        self.unit.require_examples(inputs[0])
        self.rows = self.rule.num_examples(self.unit.module, inputs)
        self.dim = self.rule.dims(self.unit.module, inputs)[0]
        self.captured.note_call(self.unit.label, self.rows)
        return list(inputs)

    def watched(self, inputs: list[Any], output: Any, leaves: list[Any]) -> Any:
        """Wrap `output` in an identity whose backward calls `backward` for the gradients of `leaves`."""
        if isinstance(output, Tensor) and self.unit.rule is not None:
            measured = MeasuredOutput.apply(
                self, inputs, 1, output.clone() if _needs_clone(output) else output, *leaves
            )
            self._note_outputs([measured])
            return measured
        tensors, rebuild = differentiable(output)
        clones = [t.clone() for t in tensors]  # outputs may be views of one another
        measured = MeasuredOutput.apply(self, inputs, len(clones), *clones, *leaves)
        measured = [measured] if isinstance(measured, Tensor) else list(measured)
        self._note_outputs(measured)
        return rebuild(measured)

    def _note_outputs(self, tensors: Sequence[Tensor]) -> None:
        rows, dim = self.example_rows
        self.output = LayerOutput.of(self.unit, rows, dim, tensors)
        if not is_in_backward():  # in backward, a checkpoint repeats a call that was recorded before
            self.captured.outputs.append(self.output)

    @property
    def example_rows(self) -> tuple[int, int | None]:
        """Number of rows that the call treats as examples, and their dimension in the first output; None if unknown."""
        return self.rows, self.dim

    def gradient(self, inputs: list[Any], grads: list[Tensor | None]) -> dict[nn.Parameter, Tensor]:
        """The gradient of each parameter for these output gradients, summed over all rows."""
        raise NotImplementedError(f"{self.unit.label} is measured by its factors.")

    def should_measure(self, accumulators: list[Any]) -> bool:
        """Whether the running backward needs `backward`; `accumulators` are the graph nodes of the leaves."""
        return self.captured.should_measure(accumulators)

    def needs_gradient_alone(self) -> bool:
        """Whether another source provides the squares: a loop over examples, or explicit per-example losses."""
        if self.captured.has_taken_examples:
            return True
        if self.output.layout == SHARED:
            self.output.require_loop()
        return self.output.layout == SHARED

    def keep(self, param: nn.Parameter, grad: Tensor, square: Tensor) -> Tensor:
        """Store the square of a parameter that no other call uses; returns the parameter's gradient."""
        self.captured.add(param, square)
        return grad.to(param.dtype)

    def share(self, param: nn.Parameter, contribution: Tensor) -> Tensor:
        """Store the contribution to a parameter that several calls use; returns the parameter's gradient."""
        grad = contribution.sum(0).to(param.dtype)
        self.captured.add_shared(param, contribution)
        return grad

    def store(self, contributions: dict[str, Tensor], is_alone: bool) -> list[Tensor | None]:
        """Store c_i ``[n, *shape]`` of every parameter, squared if no other call uses it; returns the gradients."""
        if is_alone:
            sums = {name: (c.sum(0), c.square().sum(0)) for name, c in contributions.items()}
            return [self.keep(p, *sums[name]) for name, p in self.params.items()]
        return [self.share(p, contributions[name]) for name, p in self.params.items()]


@final
class RuleCall(LayerCall):
    """One call of a unit that has a rule."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `LayerCall.run`."""
        module = self.unit.module
        inputs = self.note_inputs(args, kwargs)
        self.rng = rng_state() if self.rule.repeats_noise(module) else None
        with _detached_parameters(module):
            output, packed_again = padded_output(module, forward(*args, **kwargs))
        self.saved = self.rule.saved(module, output)
        return packed_again(self.watched(inputs, output, list(self.params.values())))

    def gradient(self, inputs: list[Any], grads: list[Tensor | None]) -> dict[nn.Parameter, Tensor]:
        """See `LayerCall.gradient`."""
        totals = self._sums(self._call(inputs), self._grad_output(grads))
        return {p: totals[name][0] for name, p in self.params.items()}

    def backward(self, inputs: list[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Measure the call; see `LayerCall.backward`."""
        if self.captured.handles_call(self, inputs, grads):
            return [None] * len(self.params)
        call, grad_output, layout = self._call(inputs), self._grad_output(grads), self.output.layout
        if self.needs_gradient_alone():
            totals = self._sums(call, grad_output)
            return [totals[name][0].to(p.dtype) for name, p in self.params.items()]
        is_alone = self.captured.needs_only_sums(self.params.values())
        if layout != ROWS:
            call, grad_output, is_whole = self._examples_first(call, grad_output, layout)
            if not is_whole:
                return self._from_rows(call, grad_output, is_alone)
        if is_alone:
            totals = self._sums(call, grad_output)
            return [self.keep(p, *totals[name]) for name, p in self.params.items()]
        return self.store(with_rng(self.rng, self.rule, self.unit.module, call, grad_output), is_alone=False)

    def _call(self, inputs: list[Any]) -> tuple[Any, ...]:
        return tuple(in_full_precision(value) for value in inputs)

    def _grad_output(self, grads: list[Tensor | None]) -> Any:
        converted = tuple(in_full_precision(grad) for grad in grads)
        return converted[0] if len(converted) == 1 else converted

    def _sums(self, call: tuple[Any, ...], grad_output: Any) -> Sums:
        workspace = self.captured.workspace
        sums: Sums = with_rng(self.rng, self.rule.sums, self.unit.module, call, grad_output, workspace, self.saved)
        return sums

    def _examples_first(self, call: tuple[Any, ...], grad: Any, layout: Layout) -> tuple[tuple[Any, ...], Any, bool]:
        """Inputs and gradient with the examples first, and whether each example is one row for the rule."""
        n = self.captured.known_batch_size or 1
        dims = self.rule.dims(self.unit.module, call)
        grads = grad if isinstance(grad, tuple) else (grad,)
        if not self.rule.takes_positions:
            grouped = [in_groups(g, dim, layout, n) for g, dim in zip(grads, self.output.dims, strict=True)]
            rows = tuple(in_groups(value, dim, layout, n) for value, dim in zip(call, dims, strict=True))
            return rows, tuple(grouped) if isinstance(grad, tuple) else grouped[0], False
        moved = [examples_first(g, dims[0], layout, n) for g in grads]
        call = tuple(examples_first(value, dim, layout, n) for value, dim in zip(call, dims, strict=True))
        if layout.kind != "dim":
            moved = [torch.unflatten(g, 0, (n, -1)) for g in moved]
            call = tuple(v if d is None else torch.unflatten(v, 0, (n, -1)) for v, d in zip(call, dims, strict=True))
        return call, tuple(moved) if isinstance(grad, tuple) else moved[0], True

    def _from_rows(self, call: tuple[Any, ...], grad: Any, is_alone: bool) -> list[Tensor | None]:
        """Measure examples of several rows each with a rule that treats every row as an example."""
        n = self.captured.known_batch_size or 1
        rows = with_rng(self.rng, self.rule, self.unit.module, call, grad)
        contributions = {name: torch.unflatten(c, 0, (n, -1)).sum(1) for name, c in rows.items()}
        return self.store(contributions, is_alone)


@final
class GenericCall(LayerCall):
    """One call of a unit without a rule, including its children unless they are measured separately."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `LayerCall.run`."""
        kind = WholeBatch if self.unit.direct_only else SingleExamples
        self.replayed = kind(self.unit.module, args, kwargs, self.captured.workspace)
        self.detached = {name: p.detach() for name, p in self.unit.named_parameters()}
        with self._children_measured() if self.unit.direct_only else self._measured_as_one():
            output = self.replayed.forward(self.detached, self._is_checked)
        self.captured.note_call(self.unit.label, self.replayed.inputs.batch_size)
        return self.watched(self.replayed.inputs.leaves, output, list(self.params.values()))

    @contextmanager
    def _measured_as_one(self) -> Iterator[None]:
        """Run the children unmeasured, as part of this call."""
        self.captured.inside_generic = True
        try:
            yield
        finally:
            self.captured.inside_generic = False

    @contextmanager
    def _children_measured(self) -> Iterator[None]:
        """Run the unit itself unwrapped, while its children are measured."""
        outer, self.captured.passing = self.captured.passing, self.unit
        try:
            yield
        finally:
            self.captured.passing = outer

    @property
    def example_rows(self) -> tuple[int, int | None]:
        """See `LayerCall.example_rows`."""
        return self.replayed.inputs.batch_size, None

    def gradient(self, inputs: list[Any], grads: list[Tensor | None]) -> dict[nn.Parameter, Tensor]:
        """See `LayerCall.gradient`."""
        trained, grads = self._prepare(inputs, grads)
        with replay_errors_named(self.unit.label), self._measured_as_one(), torch.enable_grad():
            gradient = self.replayed.gradient(trained, grads)
        return {p: gradient[name] for name, p in self.params.items()}

    def backward(self, inputs: list[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Measure the call; see `LayerCall.backward`."""
        layout, n = self.output.layout, self.captured.known_batch_size or 1
        if self.needs_gradient_alone():
            return [g.to(p.dtype) for p, g in self.gradient(inputs, grads).items()]
        trained, grads = self._prepare(inputs, grads)
        # Gradients enabled, as in the forward pass: otherwise oneDNN's LSTM saves nothing for its backward.
        with replay_errors_named(self.unit.label), self._measured_as_one(), torch.enable_grad():
            is_alone = self.captured.needs_only_sums(self.params.values())
            if layout == ROWS and is_alone:
                totals = self.replayed.sums(trained, grads)
                self._check_once(trained, grads, lambda: totals)
                return [self.keep(p, *totals[name]) for name, p in self.params.items()]
            rows = self.replayed.per_example(trained, grads)
            self._check_once(trained, grads, lambda: {k: (c.sum(0), c.square().sum(0)) for k, c in rows.items()})
            return self.store({name: added_up(c, layout, n) for name, c in rows.items()}, is_alone)

    def _prepare(self, inputs: list[Any], grads: list[Tensor | None]) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Set up the replay in full precision; return the trained parameters and the gradients in full precision."""
        self.replayed.inputs.leaves = [in_full_precision(x) for x in inputs]
        self.replayed.buffers = {name: in_full_precision(b) for name, b in self.replayed.buffers.items()}
        self.replayed.frozen = {name: in_full_precision(p) for name, p in self.detached.items()}
        trained = {name: self.replayed.frozen.pop(name) for name in self.params}
        return trained, [in_full_precision(grad) for grad in grads]

    @property
    def _key(self) -> tuple[nn.Module, tuple[int | None, ...]]:
        """The module and the example dimensions of its inputs. Each way of splitting the inputs is checked once."""
        return self.unit.module, self.replayed.inputs.dims

    def _is_checked(self) -> bool:
        return self._key in self.captured.checked

    def _check_once(self, params: dict[str, Tensor], grads: list[Tensor | None], sums: Callable[[], Sums]) -> None:
        if not self._is_checked() and all(grad.isfinite().all() for grad, _ in sums().values()):
            self.replayed.check_sum(params, grads, sums())
            if self.replayed.inputs.batch_size > 1:  # a single example cannot show mixing
                self.captured.checked.add(self._key)


@contextmanager
def _detached_parameters(module: nn.Module) -> Iterator[None]:
    """Run `module` and its children with detached parameters."""
    holders = [module] if not has_children(module) else [m for m in module.modules() if own_parameters(m)]
    originals: list[dict[str, Any]] = [dict(own_parameters(holder)) for holder in holders]
    flat = flat_weights(module)
    try:
        for holder, params in zip(holders, originals, strict=True):
            own_parameters(holder).update({name: p if p is None else p.detach() for name, p in params.items()})
        yield
    finally:
        for holder, params in zip(holders, originals, strict=True):
            own_parameters(holder).update(params)
        vars(module).update(flat)


def in_full_precision(value: Any) -> Any:
    """Convert half-precision tensors to float32: float16 underflows for squared gradients such as 1e-4²."""
    is_half = isinstance(value, Tensor) and value.dtype in {torch.float16, torch.bfloat16}
    return value.float() if is_half else value
