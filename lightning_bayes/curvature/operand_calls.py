"""Calls of functions on examples and parameters, measured like calls of layers; see `operands`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature.expressions import Expression, Slot, evaluated
from lightning_bayes.curvature.layer_calls import LayerCall, Measured, OnGradients
from lightning_bayes.curvature.layouts import examples_first
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.curvature.rules.registry import PerExample, Sums, add_sums
from lightning_bayes.curvature.rules.replayed_call import in_parts
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import UnsupportedLayerError
from lightning_bayes.private_torch import without_torch_functions


class Call(NamedTuple):
    """A call that takes parameters of a unit."""

    unit: MeasuredModule
    examples: list[Tensor]  # the arguments that hold examples
    result: Tensor
    workspace: Workspace
    on_gradients: OnGradients


class OperandCall(LayerCall, ABC):
    """A measured call, which saves the examples that its contributions depend on."""

    def __init__(self, call: Call, saved: Sequence[Tensor]) -> None:
        with without_torch_functions():
            super().__init__(call.unit, saved, len(call.result), call.examples)
            self.workspace, self.values = call.workspace, {name: p.detach() for name, p in self.params.items()}
            self.watch(call.result, 0, call.on_gradients)

    @override
    def measured(self, what: Measured, inputs: list[Any], grads: list[Tensor | None]) -> dict[str, Any]:
        assert grads[0] is not None
        parts = self._parts(inputs, grads[0])
        if what == "contributions":
            found = list(parts)
            return {name: torch.cat([part[name] for part in found]) for name in self.params}
        total: Sums = {}
        for part in parts:
            for name, contribution in part.items():
                add_sums(total, name, contribution.clone())
        return total if what == "sums" else {name: square for name, (_, square) in total.items()}

    @abstractmethod
    def _parts(self, inputs: list[Any], delta: Tensor) -> Iterator[PerExample]:
        """Yield the contributions of successive groups of examples."""

    def _at(self, values: Mapping[str, Tensor]) -> dict[Any, Tensor]:
        """Values by parameter, from values by name."""
        return {self.params[name]: value for name, value in values.items()}


@final
class BroadcastCall(OperandCall):
    """A sum or product with an operand, or its expansion to a batch. A product saves its other factor."""

    def __init__(
        self, call: Call, saved: Sequence[Tensor], operand: nn.Parameter | Expression, shape: torch.Size
    ) -> None:
        self.operand, self.shape, self.rank = operand, shape, call.result.dim()
        super().__init__(call, saved)

    @override
    def with_examples_first(
        self, inputs: list[Any], grads: list[Tensor | None], n: int
    ) -> tuple[list[Any], list[Tensor | None]]:
        return [], [
            examples_first(grad * inputs[0] if inputs else grad, 0, self.output.layout, n)
            for grad in grads
            if grad is not None
        ]

    def _parts(self, inputs: list[Any], delta: Tensor) -> Iterator[PerExample]:
        layout, padded = self.output.layout, [1] * (self.rank - len(self.shape)) + list(self.shape)
        if padded.pop(layout.dim if layout.kind == "dim" else 0) != 1:
            raise UnsupportedLayerError(f"{self.unit.label} has a parameter with values for each example.")
        delta = delta * inputs[0] if inputs else delta
        if delta.dim() > self.rank:  # several rows of an example
            delta = delta.sum(1)
        dims = [dim + 1 for dim, size in enumerate(padded) if size < delta.shape[dim + 1]]
        values = (delta.sum(dims) if dims else delta).reshape(len(delta), *self.shape)
        if isinstance(self.operand, nn.Parameter):
            yield {name: values for name in self.params}
            return
        pull_back = torch.func.vjp(lambda at: evaluated(self.operand, self._at(at)), self.values)[1]
        size = self.workspace.examples_at_once(sum(p.numel() for p in self.params.values()))
        yield from in_parts(lambda c: pull_back(c)[0], lambda i, k: [values.narrow(0, i, k)], [0], len(values), size)


@final
class FunctionCall(OperandCall):
    """Any other function, applied again to one example at a time."""

    def __init__(self, call: Call, expression: Expression, slots: Sequence[Slot]) -> None:
        self.expression, self.slots = expression, slots
        super().__init__(call, call.examples)

    def _parts(self, inputs: list[Any], delta: Tensor) -> Iterator[PerExample]:
        dims = [0 if x.dim() and len(x) == len(delta) else None for x in inputs]

        def contributions(grad: Tensor, *examples: Tensor) -> PerExample:
            pairs = zip(examples, dims, strict=True)
            one = dict(zip(self.slots, (x if dim is None else x[None] for x, dim in pairs), strict=True))
            output = lambda at: evaluated(self.expression, {**self._at(at), **one})  # noqa: E731
            found: PerExample = torch.func.vjp(output, self.values)[1](grad[None])[0]
            return found

        def select(start: int, count: int) -> list[Tensor]:
            pairs = zip((delta, *inputs), (0, *dims), strict=True)
            return [x if dim is None else x.narrow(0, start, count) for x, dim in pairs]

        size = self.workspace.examples_at_once(delta[0].numel() + sum(p.numel() for p in self.params.values()))
        yield from in_parts(contributions, select, [0, *dims], len(delta), size)
