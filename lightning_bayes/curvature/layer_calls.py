"""One call of a measured module, and the contributions of its examples to the gradients of its parameters.

A forward hook sees the inputs and the output of a call. A hook on the output sees its gradient during backward, and passes
both to the rule of the layer, or to the generic rule. Autograd's own gradient stays as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.layouts import LayerOutput, examples_first
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.curvature.rules.example_inputs import ExampleInputs
from lightning_bayes.curvature.rules.generic import ReplayedExamples
from lightning_bayes.curvature.rules.packed import padded_output
from lightning_bayes.curvature.rules.pytree import differentiable
from lightning_bayes.curvature.rules.random_numbers import rng_state, same_rng, with_rng
from lightning_bayes.curvature.rules.replayed_call import ReplayedCall
from lightning_bayes.curvature.rules.whole_batch import ReplayedBatch
from lightning_bayes.errors import BayesError, UnsupportedLayerError
from lightning_bayes.private_torch import is_view, tree_leaves, without_torch_functions

OnGradients = Callable[["LayerCall", Sequence[Tensor | None]], None]
Measured: TypeAlias = Literal["squares", "sums", "contributions"]


class Start(NamedTuple):
    """The state before a call that its rule may have to restore."""

    rng: list[Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, unit: MeasuredModule) -> Start:
        """The state that the rule of a unit may need."""
        named = unit.module.named_buffers() if unit.rule is None else ()
        return cls(rng_state(), {name: buffer.clone() for name, buffer in named})


class LayerCall(ABC):
    """One differentiable call of a unit, whose outputs are watched.

    Attributes:
        result: The output of the call, some of it as copies, for the hook that takes it away.
        rows: The number of rows of the first output.
        params: The parameters to measure, by name.
        modes: The modules of the unit, and whether each was in training mode.
    """

    output: LayerOutput
    result: Any

    def __init__(
        self, unit: MeasuredModule, inputs: Sequence[Any], rows: int, examples: Sequence[Tensor] | None = None
    ) -> None:
        self.unit, self.rows = unit, rows
        self.params = {name: p for name, p in unit.params.items() if p.requires_grad}
        self.modes = [(module, module.training) for module in unit.parts]
        tensors = [x for value in examples or inputs for x in tree_leaves(value) if isinstance(x, Tensor)]
        self._sources = [x if x.grad_fn is None else x.grad_fn for x in tensors]
        self._others = [None if isinstance(x, Tensor) else x for x in inputs]
        # Detached tensors share the version counter, so autograd still detects an input that was changed in place.
        # Before torch 2.12, a node frees its tensors with its output, so the output is kept.
        detached = (x.detach() if isinstance(x, Tensor) else None for x in inputs)
        self._saved = _Saved.apply(torch.empty(0, requires_grad=True), *detached)

    def watch(self, output: Any, dim: int | None, on_gradients: OnGradients) -> None:
        """Call `on_gradients` in the backward of these outputs; `dim` has the rows of the first one, None if unknown."""
        is_simple = isinstance(output, Tensor) and self.unit.rule is not None
        tensors, rebuild = ([output], itemgetter(0)) if is_simple else differentiable(output)
        live = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        # Outputs may be views of one another or parameters. A hook on a view is lost when its base is changed in place.
        is_copied = len(tensors) > 1 or any(is_view(tensor) or tensor.is_leaf for tensor in tensors)
        if is_copied and live:
            for index, copy in zip(live, _Copies.apply(*(tensors[index] for index in live)), strict=True):
                tensors[index] = copy
        self.output = LayerOutput(self.unit, self.rows, dim, [tensors[index] for index in live], self._sources)
        count = len(tensors)

        def on_copies(grads: Iterable[Tensor | None]) -> None:
            by_index = dict(zip(live, grads, strict=True))
            on_gradients(self, [by_index.get(index) for index in range(count)])

        if is_copied and live:
            self.output.hook = self.output.edges[0][0].register_prehook(on_copies)
        elif live:
            self.output.hook = tensors[0].register_hook(lambda grad: on_gradients(self, (grad,)))
        self.result = rebuild(tensors) if is_copied else output

    @property
    def inputs(self) -> list[Any]:
        """The inputs of the call, in full precision."""
        pairs = zip(self._saved.grad_fn.saved_tensors, self._others, strict=True)
        return [other if saved is None else in_full_precision(saved) for saved, other in pairs]

    def with_examples_first(
        self, inputs: list[Any], grads: list[Tensor | None], n: int
    ) -> tuple[list[Any], list[Tensor | None]]:
        """Inputs and output gradients with the examples in dimension 0; the rows of an example become positions."""
        assert self.unit.rule is not None
        dims, layout = self.unit.rule.dims(self.unit.module, tuple(inputs)), self.output.layout
        pairs = [*zip(inputs, dims, strict=True), *((grad, dims[0]) for grad in grads)]
        moved = [v if v is None or dim is None else examples_first(v, dim, layout, n) for v, dim in pairs]
        return moved[: len(inputs)], moved[len(inputs) :]

    @abstractmethod
    def measured(self, what: Measured, inputs: list[Any], grads: list[Tensor | None]) -> dict[str, Any]:
        """By parameter name, in full precision: Σ_i c_i² over all rows, with Σ_i c_i before it, or c_i of every row."""


@final
class RuleCall(LayerCall):
    """One call of a unit that has a rule."""

    def __init__(
        self,
        unit: MeasuredModule,
        args: Any,
        kwargs: Any,
        output: Any,
        start: Start | None,
        engine: AbstractEngine,
        on_gradients: OnGradients,
    ) -> None:
        assert unit.rule is not None
        self.rule, self._rng, self._workspace = unit.rule, None if start is None else start.rng, engine.workspace
        with without_torch_functions():
            inputs = self.rule.prepared(unit.module, args, kwargs)
            if not isinstance(inputs[0], Tensor) or inputs[0].dim() < self.rule.least_dims(unit.module):
                unit.refuse_input(inputs[0])
            dim = self.rule.dims(unit.module, inputs)[0]
            super().__init__(unit, inputs, inputs[0].shape[dim or 0])
            is_tensor = isinstance(output, Tensor)
            padded, packed_again = (output, None) if is_tensor else padded_output(unit.module, output)
            self._reused = self.rule.saved(unit.module, padded)
            self.watch(padded, dim, on_gradients)
        if packed_again is not None:
            self.result = packed_again(self.result)

    def measured(self, what: Measured, inputs: list[Any], grads: list[Tensor | None]) -> dict[str, Any]:
        """The gradient of a single output is no tuple."""
        is_whole = what == "contributions"
        function: Any = self.rule if is_whole else getattr(self.rule, what)
        extra = () if is_whole else (self._workspace, self._reused)
        arguments = self.unit.module, tuple(inputs), grads[0] if len(grads) == 1 else tuple(grads), *extra
        found: dict[str, Any] = function(*arguments) if self._rng is None else with_rng(self._rng, function, *arguments)
        return found


@final
class GenericCall(LayerCall):
    """One call of a unit without a rule, including its children unless they are measured separately."""

    def __init__(
        self,
        unit: MeasuredModule,
        args: Any,
        kwargs: Any,
        output: Any,
        start: Start | None,
        engine: AbstractEngine,
        on_gradients: OnGradients,
    ) -> None:
        assert start is not None
        inputs, (tensors, _) = ExampleInputs(unit.module, args, kwargs), differentiable(output)
        if inputs.batch_size == 1:
            inputs.infer_batch_size(tensors)
        super().__init__(unit, inputs.leaves, inputs.batch_size)
        is_noisy = bool(inputs.batch_size) and not same_rng(start.rng, rng_state())
        kind = ReplayedBatch if unit.direct_only or is_noisy else ReplayedExamples
        self._replayed = kind(
            unit.module,
            inputs,
            {name: p.detach() for name, p in unit.params.items()},
            list(self.params),
            engine.workspace,
            engine.checked,
            start.buffers,
            start.rng if is_noisy else None,
        )
        self._replayed.keep_for_check(tensors)
        inputs.leaves = []  # `_saved` has them
        self.watch(output, None, on_gradients)

    @override
    def measured(self, what: Measured, inputs: list[Any], grads: list[Tensor | None]) -> dict[str, Any]:
        with self._replaying(inputs) as replayed:
            function = replayed.per_example if what == "contributions" else replayed.sums
            found: dict[str, Any] = replayed.from_either_state(function, grads)
        if what == "contributions":
            return {name: value.detach() for name, value in found.items()}
        sums = {name: (total.detach(), square.detach()) for name, (total, square) in found.items()}
        return {name: square for name, (_, square) in sums.items()} if what == "squares" else sums

    @contextmanager
    def _replaying(self, inputs: list[Any]) -> Iterator[ReplayedCall]:
        """Set up the replay in full precision, and name the module in an error if it fails on single examples."""
        replayed = self._replayed
        replayed.inputs.leaves = inputs
        replayed.buffers, replayed.params = (
            {name: in_full_precision(tensor) for name, tensor in tensors.items()}
            for tensors in (replayed.buffers, replayed.params)
        )
        try:
            # Gradients enabled, as in the forward pass: otherwise oneDNN's LSTM saves nothing for its backward.
            with torch.enable_grad():
                yield replayed
        except (BayesError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise UnsupportedLayerError(
                f"{self.unit.label} has no curvature rule, and it cannot run on one example of its batch at a time. Pass "
                "inputs with the examples in dimension 0, write a rule (see curvature/rules/layer_norm.py), move its own "
                "parameters into a small module, or freeze them with requires_grad_(False). Apply activation "
                f"checkpointing around such a module, not inside. Its error: {str(error)[:200]}"
            ) from error


class _Saved(torch.autograd.Function):
    """Saves tensors in the graph, so that checkpointing and hooks on saved tensors apply to them."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return leaf.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing depends on the result")


class _Copies(torch.autograd.Function):
    """Copies by one node, so that a hook on it sees the gradients of all outputs at once."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return grads


def in_full_precision(value: Any) -> Any:
    """Convert half-precision tensors to float32: float16 underflows for squared gradients such as 1e-4²."""
    is_half = isinstance(value, Tensor) and value.dtype in {torch.float16, torch.bfloat16}
    return value.float() if is_half else value


@contextmanager
def as_in_forward(changed: Sequence[nn.Module], device: str) -> Iterator[None]:
    """Run without autocast, and with modules back in training or in evaluation mode, whose mode has changed since."""
    for module in changed:
        module.training = not module.training
    try:
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            yield
    finally:
        for module in changed:
            module.training = not module.training
