"""`LossRecorder`: records the loss functions and the reductions of a forward pass as they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

from torch import Tensor

from lightning_bayes.curvature.example_dims import Order, outer_size
from lightning_bayes.curvature.loss import Linked, LossRecord, only, record_of
from lightning_bayes.curvature.loss_choices import chosen
from lightning_bayes.curvature.loss_tape import LossTape
from lightning_bayes.curvature.loss_terms import Edge, Reading, Term

_AMBIGUOUS: Final = "is computed from values that may hold the examples in dimension 0 or 1"


@dataclass
class _Path:
    """What lies between the layers and a value."""

    nodes: list[Any] = field(default_factory=list)
    edges: set[Edge] = field(default_factory=set)
    depends: bool = False  # whether the value depends on examples


@dataclass(frozen=True)
class RecordedRows:
    """Where the values that a loss reduces hold the examples."""

    outer: dict[Edge, int]  # the values are [outer, B, inner]
    has_lone_pieces: bool = (
        False  # whether some term depends on one piece of the rows, such as ``v[:n]``, and on no other
    )


@final
class LossRecorder(LossTape):
    """Records the loss functions and reductions inside the context, which contains the forward pass."""

    def __init__(self, is_layer: Callable[[Any], bool] | None = None) -> None:
        super().__init__()
        self._is_layer = is_layer
        self._declared: dict[Any, RecordedRows] = {}  # of losses whose per-example losses are given

    def reduced(self, losses: Tensor, reduction: str) -> Tensor:
        """The mean or the sum of per-example losses ``[n]``."""
        values = losses.view_as(losses)
        loss = values.mean() if reduction == "mean" else values.sum()
        self._declared[loss.grad_fn] = RecordedRows({(values.grad_fn, values.output_nr): 1})
        return loss

    def read(
        self, loss: Tensor, batch_size: int | None = None, order: Order | None = None, divided_by_host: bool = False
    ) -> LossRecord:
        """Read a loss. A loss that was not recorded gives an unknown reduction, never an error."""
        node = self.node_of(loss)
        if node is None:
            return LossRecord()
        terms = (self.before.get(node) if divided_by_host else None) or self.terms.get(node)
        if terms is None:
            why = "is computed by a function that is not recorded"
            links = self._links_of(self._path(node))
            return LossRecord(
                "unknown", why, link=only({link for link, _ in links}), linked=[node for _, node in links]
            )
        read = [(term, *self._read_term(term, batch_size, order)) for term in terms]
        record = record_of([(term, reading, links) for term, reading, links, depends in read if depends], batch_size)
        is_call = len(terms) == 1 and not terms[0].steps and terms[0].call is not None
        return replace(record, call=terms[0].call) if is_call else record

    def rows(self, loss: Tensor, batch_size: int, order: Order) -> RecordedRows | None:
        """Where the values that a loss reduces hold B examples in this order; None if that is not recorded."""
        node, outer, is_lone = self.node_of(loss), {}, False
        if node in self._declared:
            return self._declared[node]
        for term in self.terms.get(node, ()):
            if not self._path(term.outputs.grad_fn).depends:
                continue
            pieces: set[Edge] = set()
            for edge, size in self._rows_of(term, batch_size, order):
                path = self._path(edge[0])
                kinds = [chosen(*self.choices[node], batch_size, order) for node in path.nodes if node in self.choices]
                if size is None or {"some", "permuted"}.intersection(kinds):
                    return None
                pieces |= {edge for edge in path.edges if edge[0] in self.choices and "piece" in kinds}
                outer[edge] = size
            is_lone |= len(pieces) == 1
        return RecordedRows(outer, is_lone) if outer else None

    def products(self, loss: Tensor) -> Iterator[tuple[Any, int, tuple[Term, ...]]]:
        """The products of a loss with learned factors: the node, the factor's position, and the terms that it multiplies."""
        steps = [step for term in self.terms.get(self.node_of(loss), ()) for step in term.steps if step.kind == "scale"]
        for (node, position), factor in {step.edge: step.value for step in steps if step.edge}.items():
            if not self._path(factor.grad_fn).depends:
                yield node, position, tuple(replace(term, steps=term.steps[:-1]) for term in self.terms[node])

    def sizes(self, loss: Tensor) -> list[int]:
        """Numbers of rows of the values that a loss reduces."""
        terms = self.terms.get(self.node_of(loss), ())
        return [len(value) for term in terms for value in (term.outputs, term.values) if value.dim()]

    def clear(self) -> None:
        """See `LossTape.clear`."""
        super().clear()
        self._declared.clear()

    def _rows_of(self, term: Term, batch_size: int, order: Order) -> Iterator[tuple[Edge, int | None]]:
        """The values of a term that hold the examples, and their `outer_size`; None if they do not fit."""
        call = term.call
        if call is None or call.reduction == "none":
            edge, size = term.read(batch_size, order).rows or ((term.values.grad_fn, term.values.output_nr), None)
            yield edge, size
            return
        if call.known.is_composite:
            dim = call.example_dim(call.outputs, batch_size, order)
            size = None if dim is None else outer_size(tuple(call.outputs.shape), dim, batch_size, order)
            yield term.values.grad_fn.next_functions[0], size  # type: ignore[union-attr]
            return
        for value in call.tensors:
            if self._path(value.grad_fn).depends:
                dim = call.example_dim(value, batch_size, order)
                size = None if dim is None else outer_size(tuple(value.shape), dim, batch_size, order)
                yield (value.grad_fn, value.output_nr), size

    def _read_term(self, term: Term, batch_size: int | None, order: Order | None) -> tuple[Reading, set[Linked], bool]:
        """How a term reduces its examples, its links, and whether it depends on examples."""
        path = self._path(term.outputs.grad_fn)
        inner = [float(self.numbers[node]) for node in path.nodes if node in self.numbers]
        orders: tuple[Order, ...] = ("rows", "second") if order is None else (order,)
        is_weighted = not self.weighted.isdisjoint(path.nodes)
        readings = [term.read(batch_size, each, inner, is_weighted) for each in orders]
        reading = readings[0]
        why = reading.why or self._why_unclear(path, batch_size, orders[0])
        if len({each.reduction for each in readings}) > 1:
            why = why or _AMBIGUOUS
        if any(self._path(factor.grad_fn).depends for factor in term.learned):
            why = why or "is multiplied by a factor that depends on the examples"
        call = term.call
        links = {(call.link, call.outputs.grad_fn)} if call and call.link else self._links_of(path)
        # Embeddings and indexing take the examples as integers, of which the graph has no trace.
        depends = path.depends or (self._is_layer is None and bool(call or links))
        return Reading("unknown" if why else reading.reduction, why, reading.factor), links, depends

    def _why_unclear(self, path: _Path, batch_size: int | None, order: Order) -> str:
        """Why the examples of the values behind a path are not those of the batch; empty if they are."""
        for node in path.nodes:
            if any(term.read(batch_size).reduction in {"mean", "sum"} for term in self.terms.get(node, ())):
                return "is a function of values that are already reduced over the examples"
            if node in self.choices and chosen(*self.choices[node], batch_size, order) in {"some", "piece"}:
                return "is computed from chosen rows"
        return ""

    def _path(self, root: Any) -> _Path:
        """What lies between the layers and a node."""
        path = _Path()
        stack, seen = [root], {root}
        while stack:
            node = stack.pop()
            if node is None:
                continue
            if self._is_layer is not None and self._is_layer(node):
                path.depends = True
                continue
            path.nodes.append(node)
            path.edges.update(node.next_functions)
            children = [child for child, _ in node.next_functions]
            path.depends |= self._is_layer is None and (None in children or node in self.noted["lookup"])
            stack += [child for child in children if child not in seen]
            seen.update(children)
        return path

    def _links_of(self, path: _Path) -> set[Linked]:
        """The links of the loss functions on a path, or of its log-probabilities, and the nodes that they act on."""
        calls = [term.call for node in path.nodes for term in self.terms.get(node, ()) if term.call is not None]
        links: set[Linked] = {(call.link, call.outputs.grad_fn) for call in calls if call.link is not None}
        return links or {("softmax", node) for node in self.log_softmax.intersection(path.nodes)}
