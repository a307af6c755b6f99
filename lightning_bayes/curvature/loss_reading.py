"""What every node of a loss's graph holds: values of single examples, their mean, their sum, or something unclear.

- PyTorch's loss functions record their reduction; ``mean`` and ``sum`` reduce the dimensions that they record.
- A sum divided by the integer number of examples, or of their values, is a mean.
- Terms of one kind add up to that kind, and a factor keeps it. A function of a mean is a mean: each example has its share.
- A term without examples, such as a penalty on the weights, does not count.

All else is unclear: a ratio or a product of terms, a function of a sum, a term of compiled code or of an unknown operation,
rows chosen by a mask, examples that an operation mixes, a sum times one over a count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_graph import Shape, name_of
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.private_torch import saved_by

_REDUCTION_CODES = {1: "mean", 2: "sum"}  # at::Reduction
_REDUCING = {"Mean": "mean", "Sum": "sum", "Nansum": "sum"}
_ADDING = {"Add", "Sub", "Stack", "Cat"}
_LINEAR = graph.RESHAPES | {"Neg", "Expand", "Select", "Slice", "Transpose", "Permute", "Mv", "Dot", "Mm", *_REDUCING}
_OF_WEIGHTS = graph.RESHAPES | _ADDING | {"Neg", "Pow", "Abs", "LinalgVectorNorm", "Sqrt", "Mul", *_REDUCING}


@dataclass(frozen=True)
class Values:
    """What a node holds.

    Attributes:
        kind: ``"examples"``, ``"mean"`` or ``"sum"`` of them, or ``"unclear"``.
        why: What the loss is, if it is unclear.
        layout: Of the examples, see `loss_graph`; None if it is not known.
        is_choice: Whether rows of the examples were chosen.
        is_weighted: Whether constants weigh or mask the examples.
        num_added: Number of values that a sum added, or that each of the examples' values did.
        num_counted: Number of targets that count in a sum; 0 if all do.
        divisor: Number that a sum was divided by, if that is not a count.
    """

    kind: str
    why: str = ""
    layout: int | None = None
    is_choice: bool = False
    is_weighted: bool = False
    num_added: int = 1
    num_counted: int = 0
    divisor: float = 1.0


class LossReader:
    """Reads one loss.

    Args:
        root: Its node.
        batch_size: B, at least 2.
        shows_layers: Whether the graph shows which layers are measured; otherwise every layer's output holds examples.
        is_declared: Whether the user said how the loss reduces.
        examples_second: Whether layers' outputs that may hold the examples in dimension 0 or 1 have them in 1.

    Attributes:
        loss: What the root holds; None if no example enters it.
        mixing: The operation that mixes examples between layers and loss; empty if none does.
        terms: For each term that reduces examples, which of its targets count, examples first; None for all.
    """

    def __init__(
        self,
        root: Any,
        batch_size: int,
        *,
        shows_layers: bool,
        is_declared: bool,
        examples_second: bool = False,
    ) -> None:
        self.root, self.batch_size = root, batch_size
        self.shows_layers, self.is_declared, self.examples_second = shows_layers, is_declared, examples_second
        self.terms: list[Tensor | None] = []
        self.mixing = ""
        self._found: dict[Any, Values | None] = {}
        nodes = list(graph.in_order(root, shows_layers))
        self._counted = [graph.counted_targets(node) for node in nodes if saved_by(node, "ignore_index") is not None]
        for node in nodes:
            self._found[node] = self._read(node)
        self.loss = self._found[root]

    def _read(self, node: Any) -> Values | None:
        if graph.is_layer(node):
            return self._layer((node, 0))
        if graph.is_leaf(node):
            return None
        edges = [edge for edge in graph.edges_of(node) if edge is not None]
        inputs = [(found, graph.shape_of(edge)) for edge in edges if (found := self._output(edge)) is not None]
        if not inputs:
            return None if self.shows_layers or _is_of_weights(node) else self._layer((node, 0))
        unclear = next((values for values, _ in inputs if values.kind == "unclear"), None)
        if unclear is not None:
            return unclear
        reduced = [values for values, _ in inputs if values.kind != "examples"]
        if not reduced:
            return self._from_examples(node, inputs)
        return self._mixed(node) if len(reduced) < len(inputs) else _from_reduced(node, reduced, self.batch_size)

    def values_of(self, edge: graph.Edge) -> Values | None:
        """What one output of a node holds; None if no example enters it."""
        return self._output(edge)

    def _output(self, edge: graph.Edge) -> Values | None:
        """What one output of a node holds; layers may return several, such as a recurrent layer's last state."""
        node, number = edge
        return self._layer(edge) if number and graph.is_layer(node) else self._found.get(node)

    def _layer(self, edge: graph.Edge) -> Values:
        node, shape = edge[0], graph.shape_of(edge)
        if math.prod(shape) == 1:
            record = getattr(node, "record", None)
            return _unclear(f"comes out of {record.unit.label} as one number" if record else _reduced_by(node))
        if len(shape) == 3 and (recurrent := _recurrent(node)) is not None:
            is_first = recurrent.batch_first and not edge[1]  # last states are [layers, B, features] in any case
            return Values("examples", layout=1 if is_first else shape[0])
        if self.examples_second and shape[1:2] == (self.batch_size,):
            return Values("examples", layout=shape[0])
        if shape[0] % self.batch_size == 0:
            return Values("examples", layout=1)
        is_clear = shape.count(self.batch_size) == 1  # as of a recurrent layer that has the sequence first
        return Values("examples", layout=math.prod(shape[: shape.index(self.batch_size)]) if is_clear else None)

    def _mixed(self, node: Any) -> Values:
        if not self.shows_layers:
            return self._layer((node, 0))
        self.mixing = name_of(node)
        return _unclear(f"mixes its examples by {self.mixing}")

    def _from_examples(self, node: Any, inputs: list[tuple[Values, Shape]]) -> Values | None:
        name, (values, shape) = name_of(node), inputs[0]
        if kind := _REDUCTION_CODES.get(saved_by(node, "reduction", 0)):
            return self._reduced(node, kind, values, shape)
        if name in _REDUCING:
            return self._summed(node, _REDUCING[name], values, shape)
        if name == "MaskedFill" and any(_is_complement(saved_by(node, "mask"), counted) for counted in self._counted):
            return None  # the second half of a cross-entropy with label smoothing
        return _unclear(_reduced_by(node)) if graph.is_number((node, 0)) else self._rearranged(node, inputs)

    def _rearranged(self, node: Any, inputs: list[tuple[Values, Shape]]) -> Values:
        """Values of single examples from values of single examples."""
        layouts = {self._moved(node, *one) for one in inputs if one[0].layout is not None or not self.shows_layers}
        if not self.shows_layers:
            return Values("examples", layout=max(layouts, key=bool))
        is_choice = any(values.is_choice or self._chooses(node, values, shape) for values, shape in inputs)
        if len(layouts) > 1 and not is_choice:
            return self._mixed(node)
        if layouts == {None} and not is_choice and len(graph.shape_of((node, 0))) < len(inputs[0][1]):
            return _unclear(_reduced_by(node))
        return Values(
            "examples",
            layout=layouts.pop() if layouts and not is_choice else None,
            is_choice=is_choice,
            is_weighted=any(values.is_weighted for values, _ in inputs) or graph.has_weights(node),
            num_added=max(values.num_added for values, _ in inputs),
        )

    def _summed(self, node: Any, kind: str, values: Values, shape: Shape) -> Values:
        dims = graph.saved_dims(node, len(shape)) or set(range(len(shape)))
        dim = self._example_dim(values, shape)
        if len(dims) == len(shape) or dim in dims:
            return self._reduced(node, kind, values, shape)
        if dim is None and self.shows_layers:
            return _unclear(f"takes the {kind} over dimensions of which one may hold the examples")
        added = math.prod(shape[d] for d in dims) if kind == "sum" else 1
        return replace(values, layout=self._moved(node, values, shape), num_added=values.num_added * added)

    def _reduced(self, node: Any, kind: str, values: Values, shape: Shape) -> Values:
        counted = graph.counted_targets(node)
        self._require_all(node, values, shape)
        self.terms.append(None if counted is None else self._examples_first(counted, values, shape))
        return Values(
            kind,
            is_weighted=values.is_weighted,
            num_added=values.num_added * math.prod(shape),
            num_counted=int(counted.sum()) if counted is not None and kind == "sum" else 0,
        )

    def _require_all(self, node: Any, values: Values, shape: Shape) -> None:
        target = saved_by(node, "target")
        sizes = shape if target is None else tuple(target.shape)
        if target is None and not self.shows_layers:
            return
        is_declared = self.is_declared and sizes[:1] >= (self.batch_size,)
        if math.prod(sizes) % self.batch_size == 0 and (is_declared or not values.is_choice):
            return
        raise UnsupportedTrainingError(
            f"A term of the loss is over values of shape {list(sizes or (1,))}, but the layers saw {self.batch_size} "
            "examples, so it may not hold a value for each. Compute the loss of all examples in one call, and mask some by "
            "targets that are ignore_index."
        )

    def _examples_first(self, counted: Tensor, values: Values, shape: Shape) -> Tensor:
        layout = values.layout
        if layout is None and self.shows_layers and counted.numel() > self.batch_size and not bool(counted.all()):
            raise UnsupportedTrainingError(
                f"Some targets of shape {list(counted.shape)} are ignore_index, but the loss's graph does not tell which "
                "example each belongs to. Pass the loss targets [batch, ...] and outputs [batch, classes, ...]."
            )
        layout = layout or 1
        if (graph.example_dim(shape, layout, self.batch_size) or 0) > 1:  # behind the classes, which targets lack
            layout //= shape[1]
        if counted.numel() % (layout * self.batch_size):  # targets that do not divide into examples cannot ignore one
            return counted.new_ones(self.batch_size)
        return counted.reshape(layout, self.batch_size, -1).transpose(0, 1)

    def _moved(self, node: Any, values: Values, shape: Shape) -> int | None:
        layout = None if values.layout is None else graph.moved(node, shape, values.layout, self.batch_size)
        after = graph.shape_of((node, 0))
        return 1 if layout is None and not self.shows_layers and after[:1] == (self.batch_size,) else layout

    def _example_dim(self, values: Values, shape: Shape) -> int | None:
        return None if values.layout is None else graph.example_dim(shape, values.layout, self.batch_size)

    def _chooses(self, node: Any, values: Values, shape: Shape) -> bool:
        dim = self._example_dim(values, shape)
        return dim is not None and graph.chooses_rows(node, shape, dim)


def _recurrent(node: Any) -> nn.RNNBase | None:
    record = getattr(node, "record", None)
    return record.unit.module if record is not None and isinstance(record.unit.module, nn.RNNBase) else None


def _from_reduced(node: Any, inputs: list[Values], batch_size: int) -> Values:
    """A function of means and sums."""
    name, first = name_of(node), inputs[0]
    if name in _ADDING:
        return _added(inputs)
    if len(inputs) > 1 or (name == "Div" and node.next_functions[0][0] is None):
        return _unclear("is a ratio of its terms" if name == "Div" else f"combines its terms by {name}")
    if name in {"Mul", "Div"} and (numbers := graph.saved_numbers(node)):
        return (_multiplied if name == "Mul" else _divided)(first, numbers[0], batch_size)
    return first if first.kind == "mean" or name in _LINEAR | {"Mul"} else _unclear(f"is the {name} of a sum")


def _added(inputs: list[Values]) -> Values:
    if len({(values.kind, values.divisor) for values in inputs}) > 1:
        return _unclear("adds a term reduced by 'sum' to one reduced by 'mean' or rescaled")
    num_added = math.gcd(*(values.num_added for values in inputs))
    return replace(inputs[0], num_added=num_added, is_weighted=any(values.is_weighted for values in inputs))


def _multiplied(values: Values, factor: Any, batch_size: int) -> Values:
    if values.kind == "mean":
        is_undone = batch_size > 2 and _is_integer(factor) and factor == batch_size
        return _unclear(f"is a mean rescaled by {batch_size}") if is_undone else values
    count = round(1 / abs(float(factor))) if factor else 0
    is_count = count > 2 and math.isclose(count * abs(float(factor)), 1, rel_tol=1e-5)
    is_count = is_count and _is_count(values, count, batch_size)
    return _unclear(f"is a sum rescaled by {float(factor):g}") if is_count else values


def _divided(values: Values, divisor: Any, batch_size: int) -> Values:
    if values.kind == "mean":
        return values
    total = values.divisor * float(divisor)
    if values.is_weighted:
        return _unclear(f"is a weighted or masked sum divided by {total:g}")
    is_mean = _is_integer(divisor) and _is_count(values, total, batch_size)
    return replace(values, kind="mean", divisor=1.0) if is_mean else replace(values, divisor=total)


def _is_count(values: Values, number: float, batch_size: int) -> bool:
    """Whether a number is that of the examples, or a multiple of it that counts their values."""
    is_multiple = number > 0 and number % batch_size == 0 and values.num_added % number == 0
    return is_multiple or number == values.num_counted > 0


def _is_integer(number: Any) -> bool:
    """Whether a number is written as an integer, such as ``len(x)``; the scale of a `GradScaler` is not."""
    return not (number.is_floating_point() if isinstance(number, Tensor) else isinstance(number, float))


def _is_complement(mask: Tensor, counted: Tensor | None) -> bool:
    return counted is not None and mask.shape == counted.shape and torch.equal(mask, ~counted)


def _is_of_weights(node: Any) -> bool:
    """Whether `node`, which no layer enters, computes a penalty on weights, and not the output of a layer from data."""
    has_constant = None in graph.edges_of(node) and not graph.is_number((node, 0))
    return bool(graph.saved_numbers(node)) or (name_of(node) in _OF_WEIGHTS and not has_constant)


def _reduced_by(node: Any) -> str:
    name = name_of(node)
    return (
        "is compiled, so that its graph shows no reduction,"
        if name == "CompiledFunction"
        else f"reduces its values by {name}"
    )


def _unclear(why: str) -> Values:
    return Values("unclear", why=why)
