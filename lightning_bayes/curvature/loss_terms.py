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

from lightning_bayes.curvature.loss_functions import LossCall

Shape: TypeAlias = tuple[int, ...]


class Step(NamedTuple):
    """One operation on a term.

    ``mean`` and ``sum`` reduce, ``mul`` and ``div`` take a number, ``scale`` a learned tensor, ``weigh`` constants of the
    values' shape, ``map`` is a function of a scalar, and ``stack`` joins scalars.
    """

    kind: str
    value: Any = None  # the number, tensor or name; the reduced dimensions, None for all
    shape: Shape = ()  # of the argument of a reduction
    keepdim: bool = False


class Reading(NamedTuple):
    """How a term reduces B examples."""

    reduction: str  # "mean", "sum", "none" or "unknown"
    why: str = ""  # predicate of a sentence about the loss, if it is unknown
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Term:
    """Values, and the steps from them to the loss.

    Attributes:
        values: The reduced values, or the outputs that a loss function reduced.
        call: The call of the loss function that computed them; None for other values.
        steps: The operations since then.
    """

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
    def learned(self) -> list[Tensor]:
        """The tensors with gradients that scale this term."""
        return [step.value for step in self.steps if step.kind == "scale"]

    @property
    def is_plain(self) -> bool:
        """Whether a loss function alone computed the term, up to numbers."""
        return self.call is not None and all(step.kind in {"mul", "div", "mean", "sum"} for step in self.steps)

    def read(self, batch_size: int | None) -> Reading:
        """How the term reduces `batch_size` examples; None reads dimension 0 as the examples."""
        reader = _Reader(self, batch_size)
        for step in self.steps:
            reader.apply(step)
        return reader.result()


class _Reader:
    """Follows the steps of a term for one batch size."""

    def __init__(self, term: Term, batch_size: int | None) -> None:
        self.batch_size, self.kind, self.why = batch_size, "none", ""
        self.factor = self.divisor = 1.0
        self.num_values = self.num_stacked = 1  # in each sum, and in a stack of scalars
        call = term.call
        self.counts = set() if call is None or call.counted is None else {int(call.counted.sum())}
        if call is not None and call.reduction != "none":
            self.kind, self.num_values = call.reduction, call.num_values
            self.dim = example_dim(tuple(call.outputs.shape), batch_size, call.known.example_dim)
        else:
            first = next(iter(term.steps), None)
            self.dim = example_dim(first.shape if first and first.shape else tuple(term.values.shape), batch_size)
        if self.dim is None:
            self.why = f"has a term that is computed from values of shape {list(term.outputs.shape)}"

    def apply(self, step: Step) -> None:
        """Follow one step."""
        if step.kind in {"mean", "sum"}:
            self._reduce(step)
        elif step.kind in {"mul", "div"}:
            if step.kind == "div" and self.kind == "mean" and isinstance(step.value, Tensor):
                self.why = self.why or "is a mean divided by a tensor"
            self._multiply(float(step.value), step.kind)
        elif step.kind == "stack":
            self.num_stacked = step.value
        elif step.kind == "map" and self.kind != "mean":
            self.why = self.why or f"is the {step.value} of a sum"

    def _reduce(self, step: Step) -> None:
        """Follow a mean or a sum over some dimensions."""
        rank = len(step.shape)
        dims = set(range(rank)) if step.value is None else {dim % max(rank, 1) for dim in step.value}
        if step.kind == "sum":
            self.num_values *= math.prod(step.shape[dim] for dim in dims)
        if step.kind == "mean":
            self.factor /= self.num_stacked
        self.num_stacked = 1
        if self.kind != "none" or self.dim is None:
            return
        if self.dim in dims:
            self.kind = step.kind
        elif not step.keepdim:
            self.dim -= sum(dim < self.dim for dim in dims)

    def _multiply(self, number: float, kind: str) -> None:
        """Follow a product with a number or its inverse, which may turn a sum into a mean."""
        factor = number if kind == "mul" else 1 / number if number else math.inf
        self.factor *= factor
        if not math.isfinite(factor) or not factor:
            return
        if self.kind == "mean" and self._is_count(abs(factor)):
            self.why = self.why or f"is a mean rescaled by {factor:g}"
        elif self.kind == "sum" and abs(factor) < 1:
            self.divisor /= abs(factor)
            if self._is_count(self.divisor):
                self.kind, self.divisor = "mean", 1.0

    def _is_count(self, number: float) -> bool:
        """Whether a number counts the examples, their values, or the targets that are not ignored."""
        count = round(number)
        if not math.isclose(count, number, rel_tol=1e-5) or count < 2 or self.batch_size is None:
            return False
        return count in self.counts or count == self.batch_size or _divides(self.batch_size, count, self.num_values)

    def result(self) -> Reading:
        """The reading after all steps."""
        if self.why:
            return Reading("unknown", self.why, self.factor)
        if self.kind == "sum" and self.divisor not in {1, 2}:
            return Reading("unknown", f"is a sum rescaled by 1/{self.divisor:g}", self.factor)
        return Reading(self.kind, "", self.factor)


def _divides(batch_size: int, count: int, num_values: int) -> bool:
    return count % batch_size == 0 and num_values % count == 0


def example_dim(shape: Shape, batch_size: int | None, preferred: int = 0) -> int | None:
    """The dimension that holds the examples: B rows, or a multiple of B in the first; None if there is none."""
    if batch_size is None:
        return preferred if preferred < len(shape) else None
    fitting: Iterable[int] = (dim for dim in (preferred, *range(len(shape))) if shape[dim : dim + 1] == (batch_size,))
    dim = next(iter(fitting), None)
    is_flat = dim is None and bool(shape) and shape[0] > 0 and shape[0] % batch_size == 0
    return 0 if is_flat else dim
