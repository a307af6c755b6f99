"""The terms of a loss: the values that a reduction took, and what happened to them until the loss.

A term follows one call of a loss function, or one ``mean`` or ``sum``, through later reductions and through products with
numbers. Two facts are read from it once the batch size B is known: whether these reductions are a mean or a sum over the
examples, and the constant factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from lightning_bayes.curvature.example_dims import Order, Shape, example_dim, outer_size
from lightning_bayes.curvature.loss_functions import LossCall

Edge: TypeAlias = tuple[Any, int]  # a node of autograd and the index of one of its outputs


class Step(NamedTuple):
    """One operation on a term.

    ``mean`` and ``sum`` reduce, ``mul`` and ``div`` take a number, ``scale`` a learned tensor, ``weigh`` constants of the
    values' shape, ``map`` is a function of a scalar, and ``stack`` joins scalars.
    """

    kind: str
    value: Any = None  # the number, tensor or name; the reduced dimensions, None for all
    shape: Shape = ()  # of the argument of a reduction
    keepdim: bool = False
    edge: Edge | None = None  # of the argument of a reduction, or the product with a learned tensor and its position


class Reading(NamedTuple):
    """How a term reduces B examples."""

    reduction: str  # "mean", "sum", "none" or "unknown"
    why: str = ""  # predicate of a sentence about the loss, if it is unknown
    factor: float = 1.0
    rows: tuple[Edge, int] | None = None  # the values whose reduction removed the examples, [outer, B, …], and `outer`


@dataclass(frozen=True, eq=False)
class Term:
    """Values, and the steps from them to the loss."""

    values: Tensor
    call: LossCall | None = None
    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> Term:
        """This term after one more step."""
        return replace(self, steps=(*self.steps, step))

    @property
    def outputs(self) -> Tensor:
        """The tensor whose rows are the examples."""
        return self.values if self.call is None else self.call.outputs

    @property
    def is_stacked(self) -> bool:
        """Whether the term is one element of a stack of scalars, and nothing else happened to it yet."""
        return bool(self.steps) and self.steps[-1].kind == "stack"

    @property
    def learned(self) -> list[Tensor]:
        """The tensors with gradients that scale this term."""
        return [step.value for step in self.steps if step.kind == "scale"]

    def read(
        self,
        batch_size: int | None,
        order: Order = "rows",
        inner: Iterable[float] = (),
        is_weighted: bool = False,
    ) -> Reading:
        """How the term reduces B examples; `inner` numbers, and weights or a mask, multiplied the values before."""
        reader = _Reader(self, batch_size, order, inner, is_weighted)
        for step in self.steps:
            reader.apply(step)
        return reader.result()


class _Reader:
    """Follows the steps of a term for one batch size."""

    def __init__(
        self, term: Term, batch_size: int | None, order: Order, inner: Iterable[float], is_weighted: bool
    ) -> None:
        self.inner, self.is_weighted, self.is_rescaled = list(inner), is_weighted, False
        self.order = order
        self.rows: tuple[Edge, int] | None = None
        self.batch_size, self.kind, self.why = batch_size, "none", ""
        self.factor = self.divisor = 1.0
        self.num_values, self.num_stacked = 1, 0  # reduced values, and scalars in a stack
        call = term.call
        self.counts = set() if call is None or call.counted is None else {int(call.counted.sum())}
        if call is not None and call.reduction != "none":
            self.kind, self.num_values = call.reduction, call.num_values
            self.dim = call.example_dim(call.outputs, batch_size, order)
        else:
            shape = next((step.shape for step in term.steps if step.shape), tuple(term.values.shape))
            self.dim = example_dim(shape, batch_size, order)
        if self.dim is None:
            self.why = f"has a term that is computed from values of shape {list(term.outputs.shape)}"

    def apply(self, step: Step) -> None:
        """Follow one step."""
        if step.kind in {"mean", "sum"}:
            self._reduce(step)
        elif step.kind in {"mul", "div"}:
            self._multiply(step)
        elif step.kind == "weigh":
            self.is_weighted = True
        elif step.kind == "stack":
            self.num_stacked = step.value
        elif step.kind == "map" and self.kind != "mean":
            self.why = self.why or f"is the {step.value} of a sum"

    def _reduce(self, step: Step) -> None:
        """Follow a mean or a sum over some dimensions."""
        rank = len(step.shape)
        dims = set(range(rank)) if step.value is None else {dim % max(rank, 1) for dim in step.value}
        if not self.num_stacked:
            self.num_values *= math.prod(step.shape[dim] for dim in dims)
        if step.kind == "mean" and self.num_stacked:
            self.factor /= self.num_stacked
        self.num_stacked = 0
        if self.kind != "none" or self.dim is None:
            return
        if self.dim in dims:
            self.kind = step.kind
            if step.edge is not None and self.batch_size:
                self.rows = (step.edge, outer_size(step.shape, self.dim, self.batch_size, self.order))
        elif not step.keepdim:
            self.dim -= sum(dim < self.dim for dim in dims)

    def _multiply(self, step: Step) -> None:
        """Follow a product with a number or its inverse, which may turn a sum into a mean."""
        number, is_tensor = float(step.value), isinstance(step.value, Tensor)
        factor = number if step.kind == "mul" else 1 / number if number else math.inf
        self.factor *= factor
        if not math.isfinite(factor) or not factor:  # the update is not finite, or the term does not matter
            return
        size, is_division = abs(factor), step.kind == "div"
        if self.kind == "none":
            self.inner.append(factor)
        elif self.kind == "mean" and (self._is_count(size) or (is_tensor and is_division)):
            self.why = self.why or f"is a mean rescaled by {factor:g}"
        elif self.kind == "sum" and size < 1:
            self.divisor /= size
            is_count = any(self._is_count(n, is_tensor, is_division) for n in (self.divisor, 1 / size))
            self.is_rescaled |= is_tensor or is_count or (is_division and number > 2 and number.is_integer())
            if is_count and not self.is_weighted:
                self.kind = "mean"

    def _is_count(self, number: float, is_tensor: bool = False, is_division: bool = False) -> bool:
        """Whether a number counts the examples, their values, or the targets that are not ignored."""
        count = round(number)
        # The factor 1/2 of a squared error is no count of two examples. A tensor may count the values of a mask.
        if not math.isclose(count, number, rel_tol=1e-5) or count < 3 - is_division or self.batch_size is None:
            return False
        if count in self.counts or count == self.num_values:
            return True
        is_multiple = count % self.batch_size == 0 and self.num_values % count == 0
        return not is_tensor and (count == self.batch_size or is_multiple)

    def result(self) -> Reading:
        """The reading after all steps."""
        kind, why = self._reduction()
        return Reading(kind, why, self.factor, self.rows)

    def _reduction(self) -> tuple[str, str]:
        """The reduction, and why it is unknown."""
        if self.why:
            return "unknown", self.why
        if self.kind == "sum" and self.is_rescaled:
            return "unknown", f"is a sum rescaled by 1/{self.divisor:g}"
        if self.kind == "sum" and self.is_weighted:
            return "unknown", "is a sum of weighted or masked values"
        sizes = [abs(factor) for factor in self.inner if factor and math.isfinite(factor)]
        if self.kind == "sum" and any(self._is_count(1 / size, is_division=True) for size in sizes):
            return "unknown", "is a sum of rescaled values"
        if self.kind == "mean" and any(map(self._is_count, sizes)):
            return "unknown", "is a mean of rescaled values"
        return self.kind, ""
