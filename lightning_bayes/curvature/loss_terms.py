"""The terms of a loss: the values that a reduction took, and what happened to them until the loss.

A term follows one call of a loss function, or one ``mean`` or ``sum``, through later reductions and through products with
numbers. Once the batch size B is known, they tell whether these reductions are a mean or a sum over the examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_bayes.likelihood.example_dims import Order, Shape, example_dim, outer_size
from lightning_bayes.likelihood.loss_functions import LossCall

Edge: TypeAlias = tuple[Any, int]  # a node of autograd and the index of one of its outputs
_LINEAR: Final = {"mean", "sum", "mul", "scale", "weigh", "stack"}


@dataclass(eq=False, slots=True)
class Value:
    """A tensor as an operation took or returned it; a later operation may change it in place."""

    grad_fn: Any
    output_nr: int
    shape: Shape
    device: torch.device
    requires_grad: bool
    tensor: Tensor | None  # if a term may need it, or if it has no node
    pointer: int = 0  # to its memory, if a Function returned it, which may have returned its argument

    @classmethod
    def of(cls, tensor: Tensor, is_kept: bool = True) -> Value:
        """The value of a tensor now."""
        node = tensor.grad_fn
        kept = tensor if is_kept or node is None else None
        pointer = tensor.data_ptr() if isinstance(node, BackwardCFunction) else 0
        return cls(node, tensor.output_nr, tuple(tensor.shape), tensor.device, tensor.requires_grad, kept, pointer)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Step(NamedTuple):
    """One operation on a term.

    ``mean`` and ``sum`` reduce, ``mul`` takes a number, ``scale`` a learned tensor, ``weigh`` constants of the values'
    shape, ``map`` is a function of a scalar, and ``stack`` joins scalars.
    """

    kind: str
    value: Any = None  # the number or tensor; the reduced dimensions, None for all
    shape: Shape = ()  # of the argument of a reduction, empty for a stack of scalars
    keepdim: bool = False
    edge: Edge | None = None  # of the argument of a reduction
    is_division: bool = False  # whether the number divides

    @property
    def factor(self) -> float:
        """The factor of a product with a number."""
        number = float(self.value)
        return number if not self.is_division else 1 / number if number else math.inf


@dataclass(frozen=True, eq=False)
class Term:
    """Values, and the steps from them to the loss."""

    values: Value
    outputs: Value  # whose rows are the examples
    call: LossCall | None = None
    steps: tuple[Step, ...] = ()
    learned: tuple[Value, ...] = ()  # factors with gradients

    @classmethod
    def of(cls, values: Value, call: LossCall | None = None) -> Term:
        """The term of values before any step."""
        return cls(values, values if call is None else Value.of(call.outputs), call)

    @property
    def edge(self) -> Edge:
        """The place of the values in the graph."""
        return self.values.grad_fn, self.values.output_nr

    def then(self, step: Step) -> Term:
        """This term after one more step."""
        return replace(self, steps=(*self.steps, step))

    @property
    def is_stacked(self) -> bool:
        """Whether the term is one element of a stack of scalars, and nothing else happened to it yet."""
        return bool(self.steps) and self.steps[-1].kind == "stack"

    @property
    def is_unchanged(self) -> bool:
        """Whether no later operation changed the values in place."""
        return self.values.tensor is not None and self.values.tensor.grad_fn is self.values.grad_fn

    @property
    def is_linear(self) -> bool:
        """Whether the loss is linear in the values."""
        return _LINEAR.issuperset(step.kind for step in self.steps)

    def parts(self, weights: Tensor, num_examples: int, order: Order) -> Tensor | None:
        """The sums over each example's values, ``[n]``, of values times weights of their shape; None if unknown."""
        call = self.call if self.call is not None and self.call.reduction != "none" else None
        assert self.values.tensor is not None
        own = self.values.tensor.detach()
        values = own if call is None else call.unreduced().detach()
        dim = example_dim(tuple(values.shape), num_examples, order)
        if dim is None:
            return None
        if call is not None:  # each value's share of the result
            total = values.sum()
            shares = values / total if bool(total) else torch.full_like(values, 1 / values.numel())
            weights, values = weights * own, shares
        outer = outer_size(tuple(values.shape), dim, num_examples, order)
        return (weights * values).reshape(outer, num_examples, -1).sum((0, 2))


class Reading:
    """How a term reduces B examples; `inner` numbers, and weights or a mask, multiplied its values before.

    Attributes:
        reduction: ``"mean"``, ``"sum"``, ``"none"`` or ``"unknown"``.
        why: Predicate of a sentence about the loss, if the reduction is unknown.
        rows: The values whose reduction removed the examples, ``[outer, B, …]``, and `outer`.
    """

    def __init__(
        self,
        term: Term,
        batch_size: int | None,
        order: Order = "rows",
        inner: Iterable[float] = (),
        is_weighted: bool = False,
    ) -> None:
        self.term, self.batch_size, self.order, self.is_weighted = term, batch_size, order, is_weighted
        self.inner, self.is_rescaled, self.divisor, self.num_values = [*inner], False, 1.0, 1
        self.reduction, self.why, preferred, call = "none", "", 0, term.call
        self.rows: tuple[Edge, int] | None = None
        shape = next((step.shape for step in term.steps if step.shape), term.values.shape)
        if call is not None and call.reduction != "none":
            self.reduction, self.num_values, shape = call.reduction, math.prod(call.shape), call.shape
            preferred = call.known.example_dim
        self.dim = example_dim(shape, batch_size, order, preferred=preferred)
        if self.dim is None:
            self.why = f"has a term that is computed from values of shape {list(term.outputs.shape)}"
        for step in term.steps:
            self._follow(step)
        if self.inner or self.is_weighted or self.is_rescaled:
            self.why = self.why or self._why_unknown()
        self.reduction = "unknown" if self.why else self.reduction

    def _follow(self, step: Step) -> None:
        """Follow one step."""
        if step.kind in {"mean", "sum"}:
            self._reduce(step)
        elif step.kind == "mul":
            self._multiply(step)
        elif step.kind == "map" and self.reduction != "mean":
            self.why = self.why or "is the function of a sum"
        self.is_weighted |= step.kind == "weigh"

    def _reduce(self, step: Step) -> None:
        """Follow a mean or a sum over some dimensions."""
        rank = len(step.shape)
        dims = set(range(rank)) if step.value is None else {dim % max(rank, 1) for dim in step.value}
        self.num_values *= math.prod(step.shape[dim] for dim in dims if rank)
        if self.reduction != "none" or self.dim is None:
            return
        if self.dim in dims:
            self.reduction = step.kind
            if step.edge is not None and self.batch_size:
                self.rows = (step.edge, outer_size(step.shape, self.dim, self.batch_size, self.order))
        elif not step.keepdim:
            self.dim -= sum(dim < self.dim for dim in dims)

    def _multiply(self, step: Step) -> None:
        """Follow a product with a number or its inverse, which may turn a sum into a mean."""
        size, is_tensor = abs(step.factor), isinstance(step.value, Tensor)
        if not size or not math.isfinite(size):  # the update is not finite, or the term does not matter
            return
        if self.reduction == "none":
            self.inner.append(size)
        elif self.reduction == "mean" and (self._is_count(size) or (is_tensor and step.is_division)):
            self.why = self.why or f"is a mean rescaled by {step.factor:g}"
        elif self.reduction == "sum" and size < 1:
            self.divisor /= size
            is_count = any(self._is_count(n, is_tensor, step.is_division) for n in (self.divisor, 1 / size))
            is_whole = step.is_division and float(step.value) > 2 and float(step.value).is_integer()
            self.is_rescaled |= is_tensor or is_count or is_whole
            if is_count and not self.is_weighted:
                self.reduction = "mean"

    def _is_count(self, number: float, is_tensor: bool = False, is_division: bool = False) -> bool:
        """Whether a number counts the examples, their values, or the targets that are not ignored."""
        count = round(number)
        # The factor 1/2 of a squared error is no count of two examples. A tensor may count the values of a mask.
        if not math.isclose(count, number, rel_tol=1e-5) or count < 3 - is_division or self.batch_size is None:
            return False
        call = self.term.call
        is_counted = call is not None and call.counted is not None and count == int(call.counted.sum())
        if is_counted or count == self.num_values:
            return True
        is_multiple = count % self.batch_size == 0 and self.num_values % count == 0
        return not is_tensor and (count == self.batch_size or is_multiple)

    def _why_unknown(self) -> str:
        """Why the numbers of the term leave its reduction open; empty if they do not."""
        if self.reduction == "sum" and self.is_rescaled:
            return f"is a sum rescaled by 1/{self.divisor:g}"
        if self.reduction == "sum" and self.is_weighted:
            return "is a sum of weighted or masked values"
        sizes = [abs(size) for size in self.inner if size and math.isfinite(size)]
        if self.reduction == "sum" and any(self._is_count(1 / size, is_division=True) for size in sizes):
            return "is a sum of rescaled values"
        return "is a mean of rescaled values" if self.reduction == "mean" and any(map(self._is_count, sizes)) else ""
