"""Read from the autograd graph how a loss reduces the examples of its batch.

The reader visits the nodes from the layers to the loss and determines the content of each (`loss_values`):

1. The output of a layer holds `Examples`. Elementwise operations, reshapes and reductions of other dimensions keep them;
   `loss_places` tracks where the examples are and which ones are selected. What is computed from a single
   example, such as ``loss(v[j])``, is a `Part`.
2. Loss functions record their reduction, and ``mean`` and ``sum`` their dimensions. If they reduce the examples, the content
   becomes `Reduced`. The linear operations before the reduction give the weights and the factors of the values: a sum is a
   mean if its weights add up to one.
3. `loss_arithmetic` reads functions of reduced values. A sum becomes a mean if it is divided by the sum of its weights, or
   by an integer that counts the examples, their values or the targets that are not ignored. The sum of the parts of all
   examples is a sum. Terms of the same kind add up to that kind, and a factor keeps the kind. A function of a mean is a
   mean.
4. A term that does not depend on any example, such as a penalty on the weights, has the content None and is ignored.

Everything else is `Unclear`: a ratio or product of terms, a function of a sum, compiled or unknown operations, a slice of
the examples, operations that mix examples, a sum times the inverse of a count. An unclear loss raises an error; the reader
never guesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature import loss_places as places
from lightning_bayes.curvature import loss_weights as weights
from lightning_bayes.curvature.loss_arithmetic import LossArithmetic
from lightning_bayes.curvature.loss_graph import Shape, name_of
from lightning_bayes.curvature.loss_values import (
    Content,
    Counted,
    Examples,
    Part,
    Place,
    Reduced,
    Unclear,
    is_same,
)
from lightning_bayes.curvature.parameter_uses import enters_measured_layer, measured_module
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.private_torch import saved_by

_REDUCTION_CODES = {1: "mean", 2: "sum"}  # at::Reduction
_CONTRACTING = {"Mm", "Mv", "Addmm"}  # multiply and sum over a dimension
_OF_WEIGHTS = graph.RESHAPES | {
    *("Add", "Sub", "Stack", "Cat", "Neg", "Pow", "Abs", "LinalgVectorNorm", "Sqrt", "Mul"),
    *graph.REDUCING,
}
_Inputs = list[tuple[Examples, Shape]]  # the arguments of a node, and their shapes


class LossReader:
    """Reads one loss."""

    def __init__(self, root: Any, batch_size: int, *, is_declared: bool, examples_second: bool = False) -> None:
        self.root, self.batch_size = root, batch_size
        self.is_declared, self.examples_second = is_declared, examples_second
        self.shows_layers = enters_measured_layer(root)
        self.terms: list[Tensor | None] = []
        self.mixing, self.has_lone_pieces = "", False
        self._arithmetic = LossArithmetic(batch_size, self.terms)
        self._contents: dict[graph.Edge, Content | None] = {}
        self._nodes = dict.fromkeys(graph.in_order(root, self.shows_layers))
        self._target_masks = [mask for node in self._nodes if (mask := graph.counted_targets(node)) is not None]
        for node in self._nodes:
            self.content_of((node, 0))
        self.loss = self.content_of((root, 0))

    def content_of(self, edge: graph.Edge) -> Content | None:
        """The content of one output of a node; None if it does not depend on any example."""
        if edge not in self._contents:
            self._contents[edge] = self._read(edge) if edge[0] in self._nodes else None  # behind the layers
        return self._contents[edge]

    def _read(self, edge: graph.Edge) -> Content | None:
        """The content of an edge, given the contents of the arguments of its node."""
        node = edge[0]
        if graph.is_layer(node):
            return self._layer_output(edge)
        if graph.is_leaf(node):
            return None
        if graph.DECLARED in graph.metadata_of(node):
            return Examples(1)
        inputs = [(self.content_of(edge), graph.shape_of(edge)) for edge in self._arguments(node)]
        if not inputs:
            return None if self.shows_layers or _is_of_weights(node) else self._layer_output(edge)
        for content, _ in inputs:
            if isinstance(content, Unclear):
                return content
        examples = [(content, shape) for content, shape in inputs if isinstance(content, Examples)]
        others = [(content, shape) for content, shape in inputs if isinstance(content, (Part, Reduced))]
        if not others:
            return self._from_examples(edge, examples)
        return self._mixed(edge, others) if examples else self._from_others(edge, others)

    def _from_others(self, edge: graph.Edge, inputs: list[tuple[Part | Reduced, Shape]]) -> Content:
        node = edge[0]
        content = self._arithmetic.result(node, inputs)
        if not isinstance(inputs[0][0], Part):
            return content
        is_hidden = isinstance(content, Unclear) and not self.shows_layers and not graph.is_number(edge)
        return self._layer_output(edge) if is_hidden else content

    def _layer_output(self, edge: graph.Edge) -> Examples | Unclear:
        node, shape = edge[0], graph.shape_of(edge)
        unit = measured_module(node)
        if math.prod(shape) == 1:
            return Unclear(f"is returned by {unit.label} as one number" if unit else _reduced_by(node))
        if len(shape) == 3 and unit is not None and isinstance(unit.module, nn.RNNBase):
            is_first = unit.module.batch_first and not edge[1]  # last states are always [layers, B, features]
            return Examples(1 if is_first else shape[0])
        has_several_rows = shape[0] % self.batch_size == 0 and shape[0] > self.batch_size
        is_second = shape[1:2] == (self.batch_size,)
        if self.examples_second and has_several_rows and (len(shape) == 2 or not is_second):
            return Examples(shape[0] // self.batch_size)
        if self.examples_second and is_second:
            return Examples(shape[0])
        if shape[0] % self.batch_size == 0:
            return Examples(1)
        if shape.count(self.batch_size) == 1:  # such as a recurrent layer with the sequence first
            return Examples(math.prod(shape[: shape.index(self.batch_size)]))
        return Examples()

    def _mixed(self, edge: graph.Edge, others: Sequence[tuple[Content, Shape]] = ()) -> Examples | Unclear:
        if not self.shows_layers:
            return self._layer_output(edge)
        if others and all(isinstance(content, Part) and math.prod(shape) > 1 for content, shape in others):
            return Unclear("combines losses of single examples with others")
        self.mixing = name_of(edge[0])
        return Unclear(f"mixes its examples by {self.mixing}")

    def _from_examples(self, edge: graph.Edge, inputs: _Inputs) -> Content | None:
        node, (values, shape) = edge[0], inputs[0]
        name = name_of(node)
        if len(inputs) == 1 and (one := self._one_example(edge, values, shape)) is not None:
            return one
        if kind := _REDUCTION_CODES.get(saved_by(node, "reduction", 0)):
            return self._reduced(node, kind, values, shape)
        if name in graph.REDUCING:
            return self._summed(edge, graph.REDUCING[name], values, shape)
        if name == "MaskedFill" and any(_is_complement(saved_by(node, "mask"), mask) for mask in self._target_masks):
            return None  # the second term of a cross entropy with label smoothing
        return Unclear(_reduced_by(node)) if graph.is_number(edge) else self._rearranged(edge, inputs)

    # -- values of single examples ------------------------------------------------------------------------------------

    def _rearranged(self, edge: graph.Edge, inputs: _Inputs) -> Examples | Unclear:
        """Values of single examples, computed from values of single examples."""
        after = [self._place_after(edge, *one) for one in inputs]
        scales = weights.scales_after(edge[0], [values for values, _ in inputs])
        if not self.shows_layers:
            return Examples(max(after, key=bool), scales=scales)
        known = {place for place, (values, _) in zip(after, inputs, strict=True) if values.place is not None}
        selected = [place for place in after if isinstance(place, Counted)]
        is_contracted = name_of(edge[0]) in _CONTRACTING and len(inputs) > 1
        if is_contracted or (len(known) > 1 and not selected):
            return self._mixed(edge)
        if known == {None} and len(graph.shape_of(edge)) < len(inputs[0][1]):
            return Unclear(_reduced_by(edge[0]))
        if selected:
            is_one = len(selected) == len(inputs) and all(is_same(selected[0], other) for other in selected)
            known = {selected[0] if is_one else Counted()}
        return Examples(
            known.pop() if known else None,
            is_weighted=graph.factors_of(edge[0]) is not None or any(values.is_weighted for values, _ in inputs),
            num_added=max(values.num_added for values, _ in inputs),
            scales=scales,
            pieces=self._pieces(edge, inputs),
        )

    def _place_after(self, edge: graph.Edge, values: Examples, shape: Shape) -> Place:
        place = values.place
        if isinstance(place, Counted):
            return Counted() if name_of(edge[0]) in places.SELECTING else place
        if place is not None:
            place = places.place_after(edge, shape, place, self.batch_size, can_select=self.shows_layers)
        if place is None and not self.shows_layers and graph.shape_of(edge)[:1] == (self.batch_size,):
            return 1
        return place

    def _pieces(self, edge: graph.Edge, inputs: _Inputs) -> frozenset[Any]:
        pieces = frozenset(piece for values, _ in inputs for piece in values.pieces)
        layout, shape = inputs[0][0].layout, inputs[0][1]
        if layout is None or places.layout_of_piece(edge, shape, layout, self.batch_size) is None:
            return pieces
        return pieces | {edge}

    def _one_example(self, edge: graph.Edge, values: Examples, shape: Shape) -> Part | None:
        """The content of ``v[j]`` or a similar edge; None for any other edge."""
        if values.layout is None:
            return None
        example = places.single_example(edge, shape, values.layout, self.batch_size)
        return None if example is None else Part(torch.arange(self.batch_size) == example, scales=values.scales)

    # -- reductions ---------------------------------------------------------------------------------------------------

    def _summed(self, edge: graph.Edge, kind: str, values: Examples, shape: Shape) -> Content:
        """The mean or sum over the dimensions that the node saves."""
        node = edge[0]
        dims = graph.saved_dims(node, len(shape)) or set(range(len(shape)))
        dim = None if values.layout is None else places.example_dim(shape, values.layout, self.batch_size)
        if len(dims) == len(shape) or dim in dims:
            return self._reduced(node, kind, values, shape)
        if dim is None and self.shows_layers:
            return Unclear(f"computes the {kind} over dimensions that may include the examples")
        return replace(
            values,
            place=self._place_after(edge, values, shape),
            num_added=values.num_added * (math.prod(shape[d] for d in dims) if kind == "sum" else 1),
        )

    def _reduced(self, node: Any, kind: str, values: Examples, shape: Shape) -> Content:
        """The mean or sum over the examples."""
        counted, sizes, selected = graph.counted_targets(node), _targets(node, shape), values.selection
        self._require_all(sizes, selected, counted)
        self.has_lone_pieces |= len(values.pieces) == 1
        if selected is not None:
            self.terms.append(selected.examples if kind == "mean" else None)
        else:
            self.terms.append(None if counted is None else self._examples_first(counted, values.layout, shape))
        reduced = Reduced(
            kind,
            is_selected=selected is not None,
            is_weighted=values.is_weighted,
            num_added=values.num_added * math.prod(shape),
            num_counted=int(counted.sum()) if counted is not None and kind == "sum" else 0,
            counted=self._counted(values, math.prod(sizes)),
            terms=(len(self.terms) - 1,),
        )
        content: Content = self._weighted(reduced, self._factor_path(node))
        for scale in values.scales - {1} if name_of(node) in graph.REDUCING else ():
            if isinstance(content, Reduced):
                content = self._arithmetic.multiplied(content, scale)
        return content

    def _counted(self, values: Examples, size: int) -> Counted:
        """The examples that count in the reduction of values of this size, apart from `_weighted` ones."""
        selected = values.selection or Counted()
        is_known = selected.examples is not None and not values.is_weighted
        return Counted(selected.examples, (float(size), *selected.totals) if is_known else ())

    def _weighted(self, reduced: Reduced, path: list[graph.Edge]) -> Reduced:
        """The content of a node that reduces values, with the weights that its values were multiplied by along a path."""
        values = self.content_of(path[-1]) if path else None
        if not isinstance(values, Examples) or values.is_weighted:
            return reduced
        factors, repeats, are_mask = weights.weights_of(path)
        examples = reduced.counted.examples
        if values.layout is not None:
            examples = places.marked_examples(factors != 0, values.layout, self.batch_size)
        total = abs(float(factors.sum())) / (math.prod(graph.shape_of(path[0])) if reduced.kind == "mean" else 1)
        totals = () if examples is None else (total, total / repeats)
        reduced = replace(reduced, is_weighted=True, counted=Counted(examples, totals))
        is_normalised = reduced.kind == "sum" and not are_mask and self._arithmetic.is_total(reduced, 1.0)
        return self._arithmetic.mean_over_counted(reduced) if is_normalised else reduced

    def _factor_path(self, node: Any) -> list[graph.Edge]:
        """The linear path from a node that reduces values back to the values before the first factor; empty without one."""
        path: list[graph.Edge] = []
        length, arguments = 0, self._arguments(node)
        while len(arguments) == 1:
            path += arguments
            before = path[-1][0]
            if len(path) > 1 and graph.factors_of(path[-2][0]) is not None:
                length = len(path)
            if graph.is_number(path[-1]) or graph.is_layer(before) or not graph.is_linear(before):
                return path[:length]
            arguments = self._arguments(before)
        return []

    def _arguments(self, node: Any) -> list[graph.Edge]:
        """The edges to the arguments of a node that depend on examples."""
        return [edge for edge in graph.edges_of(node) if edge is not None and self.content_of(edge) is not None]

    def _require_all(self, sizes: Shape, selected: Counted | None, counted: Tensor | None) -> None:
        """Require values of all examples, or of a known selection of them."""
        if not self.shows_layers:
            return
        is_any_ignored = counted is not None and not bool(counted.all())
        is_known = selected is not None and selected.examples is not None
        if is_known and not is_any_ignored:
            return
        is_declared = self.is_declared and sizes[:1] >= (self.batch_size,)
        if math.prod(sizes) % self.batch_size == 0 and (is_declared or selected is None):
            return
        raise UnsupportedTrainingError(
            f"A term of the loss reduces values of shape {list(sizes or (1,))}, but the layers saw {self.batch_size} "
            "examples, so it may not hold a value for each. Choose rows with a mask, mask targets with ignore_index, or "
            'return the per-example losses as well: {"loss": loss, "per_example_loss": losses}.'
        )

    def _examples_first(self, counted: Tensor, layout: int | None, shape: Shape) -> Tensor:
        """Rearrange a mask of targets to ``[B, …]``."""
        if layout is None and self.shows_layers and counted.numel() > self.batch_size and not bool(counted.all()):
            raise UnsupportedTrainingError(
                f"Some targets of shape {list(counted.shape)} are ignore_index, but the loss's graph does not show which "
                "example each belongs to. Pass targets [batch, ...] and outputs [batch, classes, ...] to the loss."
            )
        layout = layout or 1
        dim = places.example_dim(shape, layout, self.batch_size)
        if dim is not None and dim > 1:  # the examples come after the class dimension, which targets lack
            layout //= shape[1]
        if counted.numel() % (layout * self.batch_size):  # such targets have no ignored ones, as checked above
            return counted.new_ones(self.batch_size)
        return counted.reshape(layout, self.batch_size, -1).transpose(0, 1)


def _targets(node: Any, shape: Shape) -> Shape:
    """The shape of a loss function's targets, or of the input of another node."""
    target = saved_by(node, "target")
    return shape if target is None else tuple(target.shape)


def _is_complement(mask: Tensor, counted: Tensor) -> bool:
    return mask.shape == counted.shape and torch.equal(mask, ~counted)


def _is_of_weights(node: Any) -> bool:
    """Whether `node`, which does not depend on a layer, computes a weight penalty, not a layer's output from data."""
    has_constant = None in graph.edges_of(node) and not graph.is_number((node, 0))
    return bool(graph.saved_numbers(node)) or (name_of(node) in _OF_WEIGHTS and not has_constant)


def _reduced_by(node: Any) -> str:
    if name_of(node) == "CompiledFunction":
        return "is compiled, so that its graph shows no reduction,"
    return f"reduces its values by {name_of(node)}"
