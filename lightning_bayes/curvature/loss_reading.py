"""The content of every node of a loss's graph: values of single examples, their mean, their sum, or unclear.

- PyTorch's loss functions record their reduction; ``mean`` and ``sum`` reduce the dimensions that they record.
- A sum divided by the integer number of examples, or of their values, is a mean; so is a weighted or masked one divided by
  the sum of its weights, and the mean of rows that a mask or indices choose. Of these the examples with a weight count.
- Losses of single examples, ``loss(v[j])`` in a loop, are a sum once they are added up for every j, and values of examples
  once they are stacked.
- Terms of one kind add up to that kind, and a factor keeps it. A function of a mean is a mean: each example has its share.
- A term without examples, such as a penalty on the weights, does not count.

All else is unclear: a ratio or a product of terms, a function of a sum, a term of compiled code or of an unknown operation,
a slice of the examples, examples that an operation mixes, a sum times one over a count.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import loss_choices as choices
from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.loss_arithmetic import LossArithmetic
from lightning_bayes.curvature.loss_graph import Shape, name_of
from lightning_bayes.curvature.loss_values import Values, choice_of, is_same, one_hot, unclear
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.private_torch import saved_by

_REDUCTION_CODES = {1: "mean", 2: "sum"}  # at::Reduction
_REDUCING = {"Mean": "mean", "Sum": "sum", "Nansum": "sum"}
_ADDING = {"Add", "Sub", "Stack", "Cat"}
_CHOOSING_AGAIN = {"Index", "IndexSelect", "MaskedSelect", "Gather", "Topk", "Select", "Slice", "Unbind"}
_CONTRACTING = {"Mm", "Mv", "Addmm"}  # which multiply and add up over a dimension
_OF_WEIGHTS = graph.RESHAPES | _ADDING | {"Neg", "Pow", "Abs", "LinalgVectorNorm", "Sqrt", "Mul", *_REDUCING}


class LossReader:
    """Reads one loss.

    Args:
        root: Its node.
        batch_size: B, at least 2.
        shows_layers: Whether the graph shows which layers are measured; otherwise every layer's output holds examples.
        is_declared: Whether the user said how the loss reduces.
        examples_second: Whether layers' outputs that may hold the examples in dimension 0 or 1 have them in 1, and those
            with several rows for each example have every n-th, as in ``torch.cat([x1, x2])``.

    Attributes:
        loss: The content of the root; None if no example enters it.
        mixing: The operation that mixes examples between layers and loss; empty if none does.
        has_lone_pieces: Whether a term has one piece of the rows alone, such as ``v[:n]``, without comparing it to another.
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
        self.mixing, self.has_lone_pieces = "", False
        self._arithmetic = LossArithmetic(batch_size, self.terms)
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
        if name_of(node) == graph.DECLARED:
            return Values("examples", layout=1)
        edges = [edge for edge in graph.edges_of(node) if edge is not None]
        inputs = [(found, graph.shape_of(edge)) for edge in edges if (found := self._output(edge)) is not None]
        if not inputs:
            return None if self.shows_layers or _is_of_weights(node) else self._layer((node, 0))
        known = next((values for values, _ in inputs if values.kind == "unclear"), None)
        if known is not None:
            return known
        reduced = [values for values, _ in inputs if values.kind != "examples"]
        if not reduced:
            return self._from_examples(node, inputs)
        return self._mixed(node) if len(reduced) < len(inputs) else self._arithmetic.result(node, reduced)

    def values_of(self, edge: graph.Edge) -> Values | None:
        """The content of one output of a node; None if no example enters it."""
        return self._output(edge)

    def _output(self, edge: graph.Edge) -> Values | None:
        """The content of one output of a node; layers may return several, such as a recurrent layer's last state."""
        node, number = edge
        known = self._found.get(node)
        if name_of(node) == "Split" and known is not None:
            return replace(known, pieces=frozenset({edge}))
        if name_of(node) == "Unbind" and (behind := graph.edges_of(node)[0]) is not None:
            values, shape = self._output(behind), graph.shape_of(behind)
            if values is not None and (taken := self._taken(node, values, shape, number)) is not None:
                return taken
        return self._layer(edge) if number and graph.is_layer(node) else self._found.get(node)

    def _layer(self, edge: graph.Edge) -> Values:
        node, shape = edge[0], graph.shape_of(edge)
        if math.prod(shape) == 1:
            record = getattr(node, "record", None)
            return unclear(f"comes out of {record.unit.label} as one number" if record else _reduced_by(node))
        if len(shape) == 3 and (recurrent := _recurrent(node)) is not None:
            is_first = recurrent.batch_first and not edge[1]  # last states are [layers, B, features] in any case
            return Values("examples", layout=1 if is_first else shape[0])
        is_multiple = shape[0] % self.batch_size == 0 and shape[0] > self.batch_size
        if self.examples_second and is_multiple and (len(shape) == 2 or shape[1] != self.batch_size):
            return Values("examples", layout=shape[0] // self.batch_size)
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
        return unclear(f"mixes its examples by {self.mixing}")

    def _from_examples(self, node: Any, inputs: list[tuple[Values, Shape]]) -> Values | None:
        name, (values, shape) = name_of(node), inputs[0]
        if graph.is_number((node, 0)) and (part := self._part(node, inputs)) is not None:
            return part
        if kind := _REDUCTION_CODES.get(saved_by(node, "reduction", 0)):
            return self._reduced(node, kind, values, shape)
        if name in _REDUCING:
            return self._summed(node, _REDUCING[name], values, shape)
        if name == "MaskedFill" and any(_is_complement(saved_by(node, "mask"), counted) for counted in self._counted):
            return None  # the second half of a cross-entropy with label smoothing
        return unclear(_reduced_by(node)) if graph.is_number((node, 0)) else self._rearranged(node, inputs)

    def _rearranged(self, node: Any, inputs: list[tuple[Values, Shape]]) -> Values:
        """Values of single examples from values of single examples."""
        layouts = {self._moved(node, *one) for one in inputs if one[0].layout is not None or not self.shows_layers}
        values, shape = inputs[0]
        is_weighted = any(values.is_weighted for values, _ in inputs) or graph.has_weights(node)
        weights = choices.weighted(node, values.weights, values.is_weighted, shape) if len(inputs) == 1 else None
        taken = self._chosen(node, inputs)
        if not self.shows_layers:
            is_known = taken.example is not None
            return replace(
                taken if is_known else Values("examples"),
                layout=None if is_known else max(layouts, key=bool),
                is_weighted=is_weighted and weights is not None,
                weights=weights,
            )
        is_contracted = name_of(node) in _CONTRACTING and len(inputs) > 1 and taken.example is None
        if is_contracted or (len(layouts) > 1 and not taken.is_choice):
            return self._mixed(node)
        if layouts == {None} and not taken.is_choice and len(graph.shape_of((node, 0))) < len(inputs[0][1]):
            return unclear(_reduced_by(node))
        return replace(
            taken,
            pieces=self._pieces(node, inputs),
            layout=layouts.pop() if layouts and not taken.is_choice else None,
            is_weighted=is_weighted,
            weights=weights,
            num_added=max(values.num_added for values, _ in inputs),
        )

    def _pieces(self, node: Any, inputs: list[tuple[Values, Shape]]) -> frozenset[Any]:
        found = frozenset(piece for values, _ in inputs for piece in values.pieces)
        values, shape = inputs[0]
        if values.layout is not None and graph.cut_layout(node, shape, values.layout, self.batch_size) is not None:
            return found | {(node, 0)}
        return found

    def _chosen(self, node: Any, inputs: list[tuple[Values, Shape]]) -> Values:
        """Values with what is known of the examples that were chosen; equal for all inputs, or unknown."""
        found = [self._choice(node, *one) for one in inputs]
        first, rest = found[0], found[1:]
        if all(values.is_choice and is_same(values.counted, first.counted) for values in rest):
            return first
        return Values("examples", is_choice=any(values.is_choice for values in found))

    def _choice(self, node: Any, values: Values, shape: Shape) -> Values:
        if values.is_choice:
            is_again = name_of(node) in _CHOOSING_AGAIN and values.example is None
            return Values("examples", is_choice=True) if is_again else choice_of(values)
        if values.layout is None or not self._chooses(node, values, shape):
            return Values("examples")
        taken = self._taken(node, values, shape, 0)
        if taken is not None:
            return taken
        counted = choices.chosen_examples(node, shape, values.layout, self.batch_size)
        return Values("examples", is_choice=True, counted=counted, num_chosen=choices.num_chosen(node))

    def _taken(self, node: Any, values: Values, shape: Shape, number: int) -> Values | None:
        """The values of one example, if `node` takes them; as a part if they are a single one."""
        if values.kind != "examples" or values.layout is None:
            return None
        example = choices.single_example(node, number, shape, values.layout, self.batch_size)
        if example is None:
            return None
        kind = "part" if graph.is_number((node, number)) else "examples"
        return Values(kind, is_choice=True, example=example, counted=one_hot(example, self.batch_size))

    def _part(self, node: Any, inputs: list[tuple[Values, Shape]]) -> Values | None:
        """A number that is computed from one example alone."""
        values, shape = inputs[0]
        if values.example is None:
            return self._taken(node, values, shape, 0) if len(inputs) == 1 else None
        is_alone = all(other.example == values.example for other, _ in inputs)
        return replace(choice_of(values), kind="part") if is_alone else None

    def _summed(self, node: Any, kind: str, values: Values, shape: Shape) -> Values:
        dims = graph.saved_dims(node, len(shape)) or set(range(len(shape)))
        dim = self._example_dim(values, shape)
        if len(dims) == len(shape) or dim in dims:
            return self._reduced(node, kind, values, shape)
        if dim is None and self.shows_layers:
            return unclear(f"takes the {kind} over dimensions of which one may hold the examples")
        added = math.prod(shape[d] for d in dims) if kind == "sum" else 1
        return replace(
            values,
            layout=self._moved(node, values, shape),
            num_added=values.num_added * added,
            weights=choices.summed(values.weights, dims, kind, graph.shape_of((node, 0))),
        )

    def _reduced(self, node: Any, kind: str, values: Values, shape: Shape) -> Values:
        counted, sizes = graph.counted_targets(node), _targets(node, shape)
        self._require_all(sizes, values, counted)
        self.has_lone_pieces |= len(values.pieces) == 1
        by_target = None if counted is None or values.is_choice else self._examples_first(counted, values, shape)
        self.terms.append(values.counted if values.is_choice and kind == "mean" else by_target)
        marked = values.counted
        totals: tuple[float, ...] = (float(math.prod(sizes)), float(values.num_chosen))
        if values.weights is not None:
            weights = values.weights
            if values.layout is not None:
                marked = choices.counted_examples(weights.values != 0, values.layout, self.batch_size)
            totals = weights.totals if kind == "sum" else (float(weights.values.mean()),)
        return Values(
            kind,
            is_choice=values.is_choice,
            is_weighted=values.is_weighted,
            num_added=values.num_added * math.prod(shape),
            num_counted=int(counted.sum()) if counted is not None and kind == "sum" else 0,
            counted=marked,
            totals=() if marked is None or (values.is_weighted and values.weights is None) else totals,
            terms=(len(self.terms) - 1,),
        )

    def _require_all(self, sizes: Shape, values: Values, counted: Tensor | None) -> None:
        """Require values of each example, or of chosen ones that are known."""
        if not self.shows_layers:
            return
        is_any_ignored = counted is not None and not bool(counted.all())
        if values.is_choice and values.counted is not None and values.example is None and not is_any_ignored:
            return
        is_declared = self.is_declared and sizes[:1] >= (self.batch_size,)
        if math.prod(sizes) % self.batch_size == 0 and (is_declared or not values.is_choice):
            return
        raise UnsupportedTrainingError(
            f"A term of the loss is over values of shape {list(sizes or (1,))}, but the layers saw {self.batch_size} "
            "examples, so it may not hold a value for each. Choose rows by a mask, mask targets by ignore_index, or return "
            'the losses of the examples beside it: {"loss": loss, "per_example_loss": losses}.'
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
        layout = None if values.layout is None else self._layout_behind(node, values.layout, shape)
        after = graph.shape_of((node, 0))
        return 1 if layout is None and not self.shows_layers and after[:1] == (self.batch_size,) else layout

    def _layout_behind(self, node: Any, layout: int, shape: Shape) -> int | None:
        cut = graph.cut_layout(node, shape, layout, self.batch_size)
        return graph.moved(node, shape, layout, self.batch_size) if cut is None else cut

    def _example_dim(self, values: Values, shape: Shape) -> int | None:
        return None if values.layout is None else graph.example_dim(shape, values.layout, self.batch_size)

    def _chooses(self, node: Any, values: Values, shape: Shape) -> bool:
        dim = self._example_dim(values, shape)
        if dim is None or not graph.chooses_rows(node, shape, dim):
            return False
        return graph.cut_layout(node, shape, values.layout or 1, self.batch_size) is None


def _recurrent(node: Any) -> nn.RNNBase | None:
    record = getattr(node, "record", None)
    return record.unit.module if record is not None and isinstance(record.unit.module, nn.RNNBase) else None


def _targets(node: Any, shape: Shape) -> Shape:
    """The shape of a loss function's targets, or of what a node reduces."""
    target = saved_by(node, "target")
    return shape if target is None else tuple(target.shape)


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
