"""A training loop's division of its losses by the number of micro-batches, so that their gradients add up to a mean.

A loop over k micro-batches may call ``backward`` on ℓ_p / k or on ℓ_p. The gradients then differ by the factor k, as in
plain PyTorch. The curvature is that of the mean loss in both cases, so a division by k is read from the record of the loss.
It is the loop's if k is the number of micro-batches of the update; otherwise it belongs to the loss, as in ½ (y - f)².
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, takewhile
from operator import mul

from lightning_bayes.curvature.loss_terms import Step, Term


def possible_divisors(terms: Iterable[Term], batch_size: int | None) -> frozenset[int]:
    """The whole numbers by which a loop may have divided the mean loss that all of these terms belong to."""
    of_terms = [frozenset(_whole(_divisors(term, batch_size))) for term in terms]
    return frozenset.intersection(*of_terms) if of_terms else frozenset()


def _divisors(term: Term, batch_size: int | None) -> Iterator[float]:
    """The numbers that divide the mean of a term's values."""
    last = list(takewhile(lambda step: step.kind == "mul", reversed(term.steps)))
    if any(not math.isfinite(step.factor) or not step.factor for step in last):
        return
    reduced = next((step.kind for step in reversed(term.steps) if step.kind in {"mean", "sum"}), None)
    if (reduced or (term.call and term.call.reduction)) == "mean":
        divisors = accumulate((1 / step.factor for step in last), mul)
        yield from (divisor for divisor, step in zip(divisors, last, strict=True) if _may_be_of_loop(step))
    elif last and batch_size:  # a sum, divided by a number of values
        divisor = math.prod(1 / step.factor for step in last)
        yield from (divisor / count for count in {batch_size, _counted(term)})


def _may_be_of_loop(step: Step) -> bool:
    """Whether a loop may have scaled its loss in this way. A product with ½ is part of a squared error."""
    return step.is_division or step.factor < 0.4


def _counted(term: Term) -> int:
    """Number of the values that a sum adds up."""
    if term.call is None or term.call.reduction == "none":
        return term.values.numel()
    counted = term.call.counted
    return math.prod(term.call.shape) if counted is None else max(1, int(counted.sum()))


def _whole(numbers: Iterable[float]) -> Iterator[int]:
    return (round(number) for number in numbers if number > 1.5 and math.isclose(round(number), number, rel_tol=1e-5))
