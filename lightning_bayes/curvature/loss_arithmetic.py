"""Functions of means, sums and losses of single examples, and the numbers that turn a sum into a mean."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_graph import name_of
from lightning_bayes.curvature.loss_values import Values, is_same, unclear

_ADDING = {"Add", "Sub", "Stack", "Cat"}
_REDUCING = {"Mean", "Sum", "Nansum"}
_LINEAR = graph.RESHAPES | {"Neg", "Expand", "Select", "Slice", "Transpose", "Permute", "Mv", "Dot", "Mm", *_REDUCING}


class LossArithmetic:
    """Reads functions of reduced values.

    Args:
        batch_size: B.
        terms: See `LossReader`; entries of masked terms are set.
    """

    def __init__(self, batch_size: int, terms: list[Tensor | None]) -> None:
        self.batch_size, self.terms = batch_size, terms

    def result(self, node: Any, inputs: list[Values]) -> Values:
        """The content of a node whose arguments hold means, sums and parts.

        Args:
            node: The node.
            inputs: The contents of its arguments.

        Returns:
            What it holds.
        """
        name, first = name_of(node), inputs[0]
        if any(values.kind == "part" for values in inputs):
            return self._from_parts(node, inputs)
        if name in _ADDING:
            return _added(inputs)
        if len(inputs) > 1 or (name == "Div" and node.next_functions[0][0] is None):
            return unclear("is a ratio of its terms" if name == "Div" else f"combines its terms by {name}")
        if name in {"Mul", "Div"} and (numbers := graph.saved_numbers(node)):
            return (self._multiplied if name == "Mul" else self._divided)(first, numbers[0])
        return first if first.kind == "mean" or name in _LINEAR | {"Mul"} else unclear(f"is the {name} of a sum")

    def _from_parts(self, node: Any, inputs: list[Values]) -> Values:
        """A function of losses of single examples."""
        name, first = name_of(node), inputs[0]
        if any(values.kind != "part" or values.divisor != first.divisor for values in inputs):
            return unclear("combines losses of single examples with others")
        if name in {"Stack", "Cat"}:
            is_all = [values.example for values in inputs] == list(range(self.batch_size)) and first.divisor == 1
            if is_all:
                return Values("examples", layout=1)
            return unclear(f"stacks the losses of {len(inputs)} single examples")
        if len(inputs) == 1 and name in {"Mul", "Div"} and (numbers := graph.saved_numbers(node)):
            factor = float(numbers[0]) if name == "Div" else 1 / float(numbers[0] or math.inf)
            is_count = name == "Div" and _is_integer(numbers[0])
            if is_count or (self.batch_size > 2 and math.isclose(abs(factor), self.batch_size, rel_tol=1e-5)):
                return replace(first, divisor=first.divisor * factor) if is_count else unclear("is a rescaled sum")
            return first
        if len({values.example for values in inputs}) == 1 and first.example is not None:
            return first
        return self._joined(inputs) if name in _ADDING else unclear(f"combines losses of single examples by {name}")

    def _joined(self, inputs: list[Values]) -> Values:
        """The sum of losses of different examples."""
        masks = [values.counted for values in inputs if values.counted is not None]
        total = torch.stack(masks).sum(0)
        if int(total.max()) > 1:
            return unclear("adds up losses of some examples more often than once")
        if not bool(total.all()):
            return replace(inputs[0], example=None, counted=total.bool())
        self.terms.append(None)
        added = Values("sum", num_added=self.batch_size, terms=(len(self.terms) - 1,))
        divisor = inputs[0].divisor
        return added if divisor == 1 else self._divided(added, int(divisor) if divisor.is_integer() else divisor)

    def _multiplied(self, values: Values, factor: Any) -> Values:
        if factor and self._is_total(values, 1 / float(factor)):
            return self._mean_of_counted(values)
        if values.kind == "mean":
            is_undone = self.batch_size > 2 and _is_integer(factor) and factor == self.batch_size
            return unclear(f"is a mean rescaled by {self.batch_size}") if is_undone else values
        count = round(1 / abs(float(factor))) if factor else 0
        is_count = count > 2 and math.isclose(count * abs(float(factor)), 1, rel_tol=1e-5)
        is_count = is_count and (values.is_weighted or _is_count(values, count, self.batch_size))
        return unclear(f"is a sum rescaled by {float(factor):g}") if is_count else values

    def _divided(self, values: Values, divisor: Any) -> Values:
        if self._is_total(values, float(divisor)):
            return self._mean_of_counted(values)
        if values.kind == "mean":
            return values
        total = values.divisor * float(divisor)
        is_mean = _is_integer(divisor) and _is_count(values, total, self.batch_size)
        if values.is_weighted and not (is_mean and values.totals):
            return unclear(f"is a weighted or masked sum divided by {total:g}")
        return replace(values, kind="mean", divisor=1.0) if is_mean else replace(values, divisor=total)

    def _is_total(self, values: Values, number: float) -> bool:
        """Whether a number is the sum of the weights, or counts the chosen values."""
        if values.counted is None or values.divisor != 1 or not values.totals:
            return False
        is_nothing = not bool(values.counted.any())  # and the number keeps from dividing by zero
        return is_nothing or any(math.isclose(number, total, rel_tol=1e-5) for total in values.totals if total)

    def _mean_of_counted(self, values: Values) -> Values:
        """A mean over the examples with a weight; the others count in none of its terms."""
        for term in values.terms:
            self.terms[term] = values.counted
        return replace(values, kind="mean", totals=())


def _added(inputs: list[Values]) -> Values:
    if len({(values.kind, values.divisor) for values in inputs}) > 1:
        return unclear("adds a term reduced by 'sum' to one reduced by 'mean' or rescaled")
    first, chosen = inputs[0], [values for values in inputs if values.is_choice]
    if any(not is_same(values.counted, chosen[0].counted) for values in chosen):
        return unclear("adds terms over different examples")
    is_alike = all(values.totals == first.totals and is_same(values.counted, first.counted) for values in inputs)
    return replace(
        first,
        num_added=math.gcd(*(values.num_added for values in inputs)),
        is_choice=bool(chosen),
        is_weighted=any(values.is_weighted for values in inputs),
        counted=chosen[0].counted if chosen else first.counted,
        totals=first.totals if is_alike else (),
        terms=tuple(term for values in inputs for term in values.terms),
    )


def _is_count(values: Values, number: float, batch_size: int) -> bool:
    """Whether a number is that of the examples, or a multiple of it that counts their values."""
    is_multiple = number > 0 and number % batch_size == 0 and values.num_added % number == 0
    return is_multiple or number == values.num_counted > 0


def _is_integer(number: Any) -> bool:
    """Whether a number is written as an integer, such as ``len(x)``; the scale of a `GradScaler` is not."""
    return not (number.is_floating_point() if isinstance(number, Tensor) else isinstance(number, float))
