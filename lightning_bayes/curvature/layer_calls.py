"""Calls of measured modules, measured by the layer's rule or by the generic rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.layouts import LOOPED, ROWS, LayerOutput, Layout, added_up, examples_first
from lightning_bayes.curvature.measured_modules import BoundCall, MeasuredModule
from lightning_bayes.curvature.measured_output import MeasuredOutput, in_full_precision
from lightning_bayes.curvature.rules.example_inputs import ExampleInputs
from lightning_bayes.curvature.rules.generic import ReplayedExamples
from lightning_bayes.curvature.rules.packed import padded_output
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import rng_state, with_rng
from lightning_bayes.curvature.rules.registry import LayerRule, PerExample, Sums
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall
from lightning_bayes.curvature.rules.stateless import replaced
from lightning_bayes.curvature.rules.whole_batch import ReplayedBatch
from lightning_bayes.errors import BayesError, UnsupportedLayerError
from lightning_bayes.private_torch import has_children, is_in_backward, is_view, saved_by

if TYPE_CHECKING:
    from lightning_bayes.curvature.wrapping import WrappingCapture


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
    def backward(self, inputs: list[Any], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Measure the call and return the gradients of the leaves; both arguments are in full precision."""

    @property
    def rule(self) -> LayerRule:
        """The unit's rule."""
        assert self.unit.rule is not None
        return self.unit.rule

    def watched(self, bound: BoundCall, output: Any, leaves: list[Any]) -> Any:
        """Record the call; wrap `output` in an identity whose backward calls `backward` for the gradients of `leaves`."""
        self.captured.note_call(self.unit.label, bound.rows)
        is_simple = isinstance(output, Tensor) and self.unit.rule is not None
        tensors, rebuild = ([output], itemgetter(0)) if is_simple else differentiable(output)
        if not is_simple or _needs_clone(output):
            tensors = [tensor.clone() for tensor in tensors]  # outputs may be views of one another
        measured = MeasuredOutput.apply(self, bound.inputs, len(tensors), *tensors, *leaves)
        self.output = LayerOutput(self.unit, bound.rows, bound.dim, measured)
        if not is_in_backward():  # in backward, a checkpoint repeats a call that was recorded before
            self.captured.outputs.append(self.output)
        return rebuild(measured)

    def should_measure(self, accumulators: list[Any]) -> bool:
        """Whether the running backward needs `backward`; `accumulators` are the graph nodes of the leaves."""
        return self.captured.should_measure(accumulators)


class ContributionCall(LayerCall):
    """One call of a unit whose leaves are its parameters, measured by per-example contributions to their gradients."""

    @abstractmethod
    def sums(self, inputs: list[Any], grads: list[Tensor | None]) -> Sums:
        """Σ_i c_i and Σ_i c_i² over all rows, by parameter name."""

    @abstractmethod
    def contributions(self, inputs: list[Any], grads: list[Tensor | None]) -> PerExample:
        """c_i of every row, by parameter name."""

    def gradient(self, inputs: list[Any], grads: list[Tensor | None]) -> dict[str, Tensor]:
        """The gradient by parameter name, summed over all rows."""
        return {name: grad for name, (grad, _) in self.sums(inputs, grads).items()}

    def backward(self, inputs: list[Any], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Measure the call; see `LayerCall.backward`."""
        if self.captured.handles_call(self, inputs, grads):
            return [None] * len(self.params)
        layout, n = self.output.layout, self.captured.known_batch_size or 1
        if not self.captured.stores or layout == LOOPED:  # the squares have another source
            return self._gradients(self.gradient(inputs, grads))
        self.output.require_loop()
        if layout != ROWS and self.output.takes_positions:
            inputs, grads, layout = *self._examples_first(inputs, grads, layout, n), ROWS
        if layout == ROWS and self.captured.needs_only_sums(self.params.values()):
            sums = self.sums(inputs, grads)
            for name, param in self.params.items():
                self.captured.add(param, sums[name][1])
            return self._gradients({name: grad for name, (grad, _) in sums.items()})
        contributions = {name: added_up(c, layout, n) for name, c in self.contributions(inputs, grads).items()}
        for name, param in self.params.items():
            self.captured.add_contributions(param, contributions[name])
        return self._gradients({name: contributions[name].sum(0) for name in self.params})

    def _gradients(self, by_name: dict[str, Tensor]) -> list[Tensor | None]:
        return [by_name[name].to(param.dtype) for name, param in self.params.items()]

    def _examples_first(
        self, inputs: list[Any], grads: list[Tensor | None], layout: Layout, n: int
    ) -> tuple[list[Any], list[Tensor | None]]:
        """Inputs and output gradients with the examples in dimension 0; the rows of an example become positions."""
        dims = self.rule.dims(self.unit.module, tuple(inputs))
        pairs = [*zip(inputs, dims, strict=True), *((grad, dims[0]) for grad in grads)]
        moved = [v if v is None or dim is None else examples_first(v, dim, layout, n) for v, dim in pairs]
        return moved[: len(inputs)], moved[len(inputs) :]


@final
class RuleCall(ContributionCall):
    """One call of a unit that has a rule."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `LayerCall.run`."""
        module = self.unit.module
        bound = self.unit.bind(args, kwargs)
        self.rng = rng_state() if self.rule.repeats_noise(module) else None
        with replaced(module, {p: p.detach() for _, p in self.unit.named_parameters()}):
            output, packed_again = padded_output(module, forward(*args, **kwargs))
        self.saved = self.rule.saved(module, output)
        return packed_again(self.watched(bound, output, list(self.params.values())))

    def sums(self, inputs: list[Any], grads: list[Tensor | None]) -> Sums:
        """See `ContributionCall.sums`."""
        workspace = self.captured.workspace
        totals: Sums = with_rng(
            self.rng, self.rule.sums, self.unit.module, *_of_rule(inputs, grads), workspace, self.saved
        )
        return totals

    def contributions(self, inputs: list[Any], grads: list[Tensor | None]) -> PerExample:
        """See `ContributionCall.contributions`."""
        contributions: PerExample = with_rng(self.rng, self.rule, self.unit.module, *_of_rule(inputs, grads))
        return contributions


@final
class GenericCall(ContributionCall):
    """One call of a unit without a rule, including its children unless they are measured separately."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `LayerCall.run`."""
        unit, captured = self.unit, self.captured
        kind = ReplayedBatch if unit.direct_only else ReplayedExamples
        inputs = ExampleInputs(unit.module, args, kwargs)
        params = {name: p.detach() for name, p in unit.named_parameters()}
        self.replayed = kind(unit.module, inputs, params, list(self.params), captured.workspace, captured.checked)
        with captured.unwrapped(lambda called: called is unit or not unit.direct_only):
            output = self.replayed.forward()
        bound = BoundCall(tuple(inputs.leaves), inputs.batch_size, None)
        return self.watched(bound, output, list(self.params.values()))

    def sums(self, inputs: list[Any], grads: list[Tensor | None]) -> Sums:
        """See `ContributionCall.sums`."""
        with self._replaying(inputs) as replayed:
            return replayed.sums(grads)

    def contributions(self, inputs: list[Any], grads: list[Tensor | None]) -> PerExample:
        """See `ContributionCall.contributions`."""
        with self._replaying(inputs) as replayed:
            return replayed.per_example(grads)

    def gradient(self, inputs: list[Any], grads: list[Tensor | None]) -> dict[str, Tensor]:
        """See `ContributionCall.gradient`."""
        with self._replaying(inputs) as replayed:
            return replayed.gradient(grads)

    @contextmanager
    def _replaying(self, inputs: list[Any]) -> Iterator[ReplayedCall]:
        """Set up the replay in full precision."""
        replayed = self.replayed
        replayed.inputs.leaves = inputs
        replayed.buffers, replayed.params = (
            {name: in_full_precision(tensor) for name, tensor in tensors.items()}
            for tensors in (replayed.buffers, replayed.params)
        )
        # Gradients enabled, as in the forward pass: otherwise oneDNN's LSTM saves nothing for its backward.
        with _replay_errors_named(self.unit.label), self.captured.unwrapped(lambda called: True), torch.enable_grad():
            yield replayed


@contextmanager
def _replay_errors_named(label: str) -> Iterator[None]:
    """Name the module in the error if it fails to run on single examples."""
    try:
        yield
    except (BayesError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise UnsupportedLayerError(
            f"{label} has no curvature rule, and it cannot run on one example of its batch at a time. Pass inputs with "
            "the examples in dimension 0, write a rule (see curvature/rules/layer_norm.py), move its own parameters into a "
            "small module, or freeze them with requires_grad_(False). Apply activation checkpointing around such a module, "
            f"not inside. Its error: {str(error)[:200]}"
        ) from error


def _needs_clone(output: Tensor) -> bool:
    """Whether `output` must be cloned before a custom function marks it dirty: it is a view or saved for backward."""
    return is_view(output) or saved_by(output.grad_fn, "result") is not None


def _of_rule(inputs: list[Any], grads: list[Tensor | None]) -> tuple[tuple[Any, ...], Any]:
    """The arguments of a rule; the gradient of a single output is no tuple."""
    return tuple(inputs), grads[0] if len(grads) == 1 else tuple(grads)
