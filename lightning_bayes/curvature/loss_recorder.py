"""`LossRecorder`: records the loss functions and the reductions of a forward pass as they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import Tensor

from lightning_bayes.curvature.loss import Linked, LossRecord, only, record_of
from lightning_bayes.curvature.loss_choices import leaves_out
from lightning_bayes.curvature.loss_tape import LossTape
from lightning_bayes.curvature.loss_terms import Reading, Term


@dataclass
class _Path:
    """What lies between the layers and a value."""

    nodes: list[Any] = field(default_factory=list)
    depends: bool = False  # whether the value depends on examples


@final
class LossRecorder(LossTape):
    """Records the loss functions and reductions inside the context, which contains the forward pass."""

    def __init__(self, is_layer: Callable[[Any], bool] | None = None) -> None:
        super().__init__()
        self._is_layer = is_layer

    def read(self, loss: Tensor, batch_size: int | None = None, divided_by_host: bool = False) -> LossRecord:
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
        read = [(term, *self._read_term(term, batch_size)) for term in terms]
        record = record_of([(term, reading, links) for term, reading, links, depends in read if depends], batch_size)
        is_call = len(terms) == 1 and not terms[0].steps and terms[0].call is not None
        return replace(record, call=terms[0].call) if is_call else record

    def _read_term(self, term: Term, batch_size: int | None) -> tuple[Reading, set[Linked], bool]:
        """How a term reduces its examples, its links, and whether it depends on examples."""
        path = self._path(term.outputs.grad_fn)
        inner = [float(self.numbers[node]) for node in path.nodes if node in self.numbers]
        reading = term.read(batch_size, inner, not self.weighted.isdisjoint(path.nodes))
        why = reading.why or self._why_unclear(path, batch_size)
        if any(self._path(factor.grad_fn).depends for factor in term.learned):
            why = why or "is multiplied by a factor that depends on the examples"
        call = term.call
        links = {(call.link, call.outputs.grad_fn)} if call and call.link else self._links_of(path)
        return Reading("unknown" if why else reading.reduction, why, reading.factor), links, path.depends

    def _why_unclear(self, path: _Path, batch_size: int | None) -> str:
        """Why the examples of the values behind a path are not those of the batch; empty if they are."""
        for node in path.nodes:
            if any(term.read(batch_size).reduction in {"mean", "sum"} for term in self.terms.get(node, ())):
                return "is a function of values that are already reduced over the examples"
            if node in self.choices and leaves_out(*self.choices[node], batch_size):
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
            children = [child for child, _ in node.next_functions]
            path.depends |= self._is_layer is None and None in children
            stack += [child for child in children if child not in seen]
            seen.update(children)
        return path

    def _links_of(self, path: _Path) -> set[Linked]:
        """The links of the loss functions on a path, or of its log-probabilities, and the nodes that they act on."""
        calls = [term.call for node in path.nodes for term in self.terms.get(node, ()) if term.call is not None]
        links: set[Linked] = {(call.link, call.outputs.grad_fn) for call in calls if call.link is not None}
        return links or {("softmax", node) for node in self.log_softmax.intersection(path.nodes)}
