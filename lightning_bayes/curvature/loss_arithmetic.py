"""Functions of means, sums and parts, and the divisors that turn a sum into a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_graph import Shape, name_of
from lightning_bayes.curvature.loss_values import Counted, Examples, Part, Reduced, Unclear, is_same
from lightning_bayes.curvature.loss_weights import scales_after

_APART = Unclear("combines losses of single examples with others")


class LossArithmetic:
    """Reads functions of means, sums and parts."""

    def __init__(self, batch_size: int, terms: list[Tensor | None]) -> None:
        self.batch_size, self.terms = batch_size, terms

    def result(self, node: Any, inputs: Sequence[tuple[Part | Reduced, Shape]]) -> Examples | Part | Reduced | Unclear:
        """The content of a node, from the contents and shapes of its arguments."""
        reduced = [content for content, _ in inputs if isinstance(content, Reduced)]
        parts = [content for content, _ in inputs if isinstance(content, Part)]
        if reduced and parts:
            return _APART
        numbers = graph.saved_numbers(node) if graph.is_linear(node) else []
        if numbers and (reduced or graph.is_number((node, 0))):
            apply = self.divided if name_of(node) == "Div" else self.multiplied
            return apply(inputs[0][0], numbers[0])
        if parts:
            return self._from_parts(node, parts)
        return self._from_reduced(node, reduced, max(math.prod(shape) for _, shape in inputs))

    def _from_reduced(self, node: Any, inputs: list[Reduced], size: int) -> Reduced | Unclear:
        name, first = name_of(node), inputs[0]
        if first.kind == "mean" and name not in graph.STACKING and math.prod(graph.shape_of((node, 0))) > size:
            return Unclear(f"repeats a mean by {name}")
        if name in graph.ADDING:
            return _added(inputs)
        if name == "Div" and (len(inputs) > 1 or graph.edges_of(node)[0] is None):
            return Unclear("is a ratio of its terms")
        if len(inputs) > 1:
            return Unclear(f"combines its terms by {name}")
        if first.kind == "mean" or name == "Mul" or name in graph.LINEAR:
            return first
        return Unclear(f"is the {name} of a sum")

    def _from_parts(self, node: Any, inputs: list[Part]) -> Examples | Part | Reduced | Unclear:
        name, first = name_of(node), inputs[0]
        if any(part.divisor != first.divisor for part in inputs):
            return _APART
        scales = scales_after(node, inputs)
        if name not in graph.STACKING and all(part.has_only(first.examples) for part in inputs):
            return replace(first, scales=scales)
        if any(_inverse(scale) == self.batch_size for scale in scales):
            return Unclear("is a rescaled sum")
        masks = torch.stack([part.examples for part in inputs])
        if name in graph.STACKING:
            is_batch = torch.equal(masks, torch.eye(self.batch_size, dtype=torch.bool)) and first.divisor == 1
            is_batch = is_batch and math.prod(graph.shape_of((node, 0))) == self.batch_size
            unclear = Unclear(f"stacks the losses of {len(inputs)} single examples")
            return Examples(1, scales=scales) if is_batch else unclear
        if name in graph.ADDING:
            return self._joined(masks, first.divisor)
        return Unclear(f"combines losses of single examples by {name}")

    def _joined(self, masks: Tensor, divisor: float) -> Part | Reduced | Unclear:
        """The sum of losses of different examples."""
        counts = masks.sum(0)
        if int(counts.max()) > 1:
            return Unclear("counts the losses of some examples more than once")
        if not bool(counts.all()):
            return Part(counts.bool(), divisor)
        self.terms.append(None)
        total = Reduced("sum", num_added=self.batch_size, terms=(len(self.terms) - 1,))
        return total if divisor == 1 else self.divided(total, int(divisor))

    def multiplied(self, values: Part | Reduced, factor: Any) -> Part | Reduced | Unclear:
        """The product of values and a number, which may be the inverse of a number of examples."""
        count = _inverse(factor)
        if isinstance(values, Part):
            return replace(values, scales=frozenset(scale * float(factor) for scale in values.scales))
        if factor and self.is_total(values, 1 / float(factor)):
            return self.mean_over_counted(values)
        if values.kind == "mean":
            is_undone = _is_integer(factor) and factor > 2 and factor in (self.batch_size, values.num_added)
            return Unclear(f"is a mean rescaled by {int(factor)}") if is_undone else values
        if count and (values.is_weighted or count == self.batch_size or self._is_count(values, count)):
            return Unclear(f"is a sum rescaled by {float(factor):g}")
        return values

    def divided(self, values: Part | Reduced, divisor: Any) -> Part | Reduced | Unclear:
        """The quotient of values and a number. Only integers count as numbers of examples, such as ``len(x)``."""
        is_integer, total = _is_integer(divisor), values.divisor * float(divisor)
        if isinstance(values, Part):
            return replace(values, divisor=total) if is_integer else self.multiplied(values, 1 / (divisor or math.inf))
        if self.is_total(values, float(divisor)):
            return self.mean_over_counted(values)
        if values.kind == "mean":
            return values
        is_mean = is_integer and self._is_count(values, total)
        if values.is_weighted and not (is_mean and values.counted.totals):
            return Unclear(f"is a weighted or masked sum divided by {total:g}")
        return replace(values, kind="mean", divisor=1.0) if is_mean else replace(values, divisor=total)

    def _is_count(self, values: Reduced, number: float) -> bool:
        """Whether a number counts the examples, their values, or the targets that are not ignored."""
        is_multiple = number > 0 and number % self.batch_size == 0 and values.num_added % number == 0
        return is_multiple or number == values.num_counted > 0

    def is_total(self, values: Reduced, number: float) -> bool:
        """Whether a number is the sum of the weights, or the number of the selected values."""
        examples, totals = values.counted.examples, values.counted.totals
        if examples is None or values.divisor != 1 or not totals:
            return False
        if not bool(examples.any()):  # the total is zero, and the number avoids a division by it
            return True
        return any(math.isclose(number, total, rel_tol=1e-5) for total in totals if total)

    def mean_over_counted(self, values: Reduced) -> Reduced:
        """A mean over the examples with a weight. The other examples do not count in any of its terms."""
        for term in values.terms:
            self.terms[term] = values.counted.examples
        return replace(values, kind="mean", counted=Counted(values.counted.examples))


def _added(inputs: list[Reduced]) -> Reduced | Unclear:
    first, selected = inputs[0], [values for values in inputs if values.is_selected]
    if any(values.kind != first.kind or values.divisor != first.divisor for values in inputs):
        return Unclear("adds a term reduced by 'sum' to one reduced by 'mean' or rescaled")
    counted = selected[0].counted if selected else first.counted
    if any(not is_same(values.counted, counted) for values in selected):
        return Unclear("adds terms over different examples")
    if any(not is_same(values.counted, counted) or values.counted.totals != counted.totals for values in inputs):
        counted = Counted(counted.examples)
    return replace(
        first,
        num_added=math.gcd(*(values.num_added for values in inputs)),
        is_selected=bool(selected),
        is_weighted=any(values.is_weighted for values in inputs),
        counted=counted,
        terms=tuple(term for values in inputs for term in values.terms),
    )


def _is_integer(number: Any) -> bool:
    """Whether a number has an integer type, such as ``len(x)``, unlike the scale of a `GradScaler`."""
    return not (number.is_floating_point() if isinstance(number, Tensor) else isinstance(number, float))


def _inverse(factor: Any) -> int:
    """The integer k > 2 for which a factor is 1/k or -1/k; 0 for other factors."""
    count = round(1 / abs(float(factor))) if factor and math.isfinite(factor) else 0
    return count if count > 2 and math.isclose(count * abs(float(factor)), 1, rel_tol=1e-5) else 0
