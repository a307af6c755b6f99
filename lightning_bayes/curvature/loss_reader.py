"""`LossReader`: reads how a loss reduced the examples from the tape of the forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from lightning_bayes.curvature.layer_graph import LAYER
from lightning_bayes.curvature.loss import LossRecord
from lightning_bayes.curvature.loss_terms import Edge, Reading, Term, Value
from lightning_bayes.curvature.operations import OPERATIONS
from lightning_bayes.curvature.tape import Tape
from lightning_bayes.curvature.tensor_record import Recorded, TensorRecord
from lightning_bayes.likelihood.example_dims import Order, example_dim, outer_size
from lightning_bayes.private_torch import without_torch_functions

_NOT_RECORDED: Final = "is computed by a function that is not recorded"
_MIXED: Final = "adds a term reduced by 'sum' to one reduced by 'mean' or rescaled"
_AMBIGUOUS: Final = "is computed from values that may hold the examples in dimension 0 or 1"


class ExampleRows(NamedTuple):
    """Tensors between layers and loss that hold n examples as ``[outer, n, inner]``, after flattening and splitting."""

    num_examples: int  # n
    order: Order = "rows"
    outer: dict[Edge, int] = {}  # noqa: RUF012
    is_recorded: bool = (
        False  # whether the record tells where the examples are, and no term uses a lone piece of the rows
    )


class _TermRecord(NamedTuple):
    """How one term reduces its examples."""

    reduction: str
    why: str
    counted: Tensor | None


@dataclass
class _Path:
    """What lies between the layers and a value."""

    nodes: list[Any] = field(default_factory=list)
    depends: bool = False  # whether the value depends on examples


@final
class LossReader:
    """What the tape of a forward pass tells about its losses.

    Args:
        tape: The tape.
        has_layers: Whether the outputs of the layers that see the examples are marked. If not, all inputs without a graph
            hold examples.
    """

    def __init__(self, tape: Tape, has_layers: bool = False) -> None:
        self.tape, self._has_layers = tape, has_layers
        self._record, self._num_played = TensorRecord(), 0
        self._declared: dict[Any, ExampleRows] = {}  # of losses whose per-example losses are given

    @property
    def record(self) -> TensorRecord:
        """What is known about the tensors of the pass so far."""
        operations = self.tape.operations
        for function, value, args, kwargs in operations[self._num_played :]:
            handler, first = OPERATIONS[function]
            handler(self._record, *first, value, *args, **kwargs)
        self._num_played = len(operations)
        return self._record

    def terms(self, loss: Tensor) -> tuple[Term, ...]:
        """The terms of a loss."""
        return self.record.terms_of(Value.of(loss))

    def reduced(self, losses: Tensor, reduction: str) -> Tensor:
        """The mean or the sum of per-example losses ``[n]``."""
        values = losses.view_as(losses)
        loss = values.mean() if reduction == "mean" else values.sum()
        self._declared[loss.grad_fn] = ExampleRows(len(losses), "rows", {(values.grad_fn, values.output_nr): 1}, True)
        return loss

    def read(
        self, loss: Tensor, batch_size: int | None = None, order: Order | None = None, divided_by_host: bool = False
    ) -> LossRecord:
        """Read a loss. A loss that was not recorded gives an unknown reduction, never an error."""
        if loss.grad_fn is None:
            return LossRecord()
        node = self.record.node_of(Value.of(loss))
        known = self.record.at(node)
        last = known.factor if divided_by_host else None
        terms = known.terms if last is None else tuple(replace(t, steps=t.steps[:-1]) for t in known.terms)
        with without_torch_functions():
            found = [read for term in terms if (read := self._read_term(term, batch_size, order)) is not None]
            rows = [_rows(read.counted, batch_size, order or "rows") for read in found]
            counting = [each for each in rows if each is not None]
        reduction, why = _joint(found, batch_size) if terms or batch_size == 1 else ("unknown", _NOT_RECORDED)
        return LossRecord(
            reduction,
            why,
            max(1, int(torch.stack(counting).any(0).sum())) if counting and len(counting) == len(rows) else None,
            terms[0].call if len(terms) == 1 and not terms[0].steps else None,
            last,
        )

    def rows(self, loss: Tensor, batch_size: int, order: Order) -> ExampleRows | None:
        """Where the values that a loss reduces hold B examples in this order; None if that is not recorded."""
        outer: dict[Edge, int] = {}
        is_lone = False
        if loss.grad_fn in self._declared:
            return self._declared[loss.grad_fn]._replace(num_examples=batch_size, order=order)
        for term in self.terms(loss):
            if not self._path(term.outputs.grad_fn).depends:
                continue
            pieces: set[Edge] = set()
            for edge, size in self._rows_of(term, batch_size, order):
                nodes = self._path(edge[0]).nodes
                kept = {
                    node: chosen.kept(batch_size, order) for node in nodes if (chosen := self.record.at(node).selection)
                }
                if size is None or {"some", "permuted"}.intersection(kept.values()):
                    return None
                if "piece" in kept.values():
                    pieces.update(each for node in nodes for each in node.next_functions if each[0] in kept)
                outer[edge] = size
            is_lone |= len(pieces) == 1
        return ExampleRows(batch_size, order, outer, not is_lone) if outer else None

    def scaled(self, loss: Tensor) -> list[Term]:
        """The terms of a loss that are linear in their values and scaled by learned factors, which no example enters."""
        terms = [term for term in self.terms(loss) if term.learned and term.is_linear and term.is_unchanged]
        return [term for term in terms if not any(self._path(factor.grad_fn).depends for factor in term.learned)]

    def sizes(self, loss: Tensor) -> list[int]:
        """Numbers of rows of the values that a loss reduces."""
        return [value.shape[0] for term in self.terms(loss) for value in (term.outputs, term.values) if value.shape]

    def _rows_of(self, term: Term, batch_size: int, order: Order) -> Iterator[tuple[Edge, int | None]]:
        """The values of a term that hold the examples, and their `outer_size`; None if they do not fit."""
        call = term.call
        if call is None or call.reduction == "none":
            yield Reading(term, batch_size, order).rows or (term.edge, None)
            return
        values = [call.outputs] if call.known.is_composite else call.tensors
        for value in values:
            if call.known.is_composite or self._path(value.grad_fn).depends:
                dim = call.example_dim(value, batch_size, order)
                size = None if dim is None else outer_size(tuple(value.shape), dim, batch_size, order)
                edge = term.edge[0].next_functions[0] if call.known.is_composite else (value.grad_fn, value.output_nr)
                yield edge, size

    def _read_term(self, term: Term, batch_size: int | None, order: Order | None) -> _TermRecord | None:
        """How a term reduces its examples; None if it depends on none."""
        path, call = self._path(term.outputs.grad_fn), term.call
        known = [self.record.at(node) for node in path.nodes]
        # Embeddings and indexing take the examples as integers, of which the graph has no trace.
        if not path.depends and (self._has_layers or not (call or any(each.is_of_losses for each in known))):
            return None
        inner = [each.factor.factor for each in known if each.factor is not None]
        is_weighted = any("weighted" in each.notes for each in known)
        orders: tuple[Order, ...] = ("rows", "second") if order is None else (order,)
        reading, *others = [Reading(term, batch_size, each, inner, is_weighted) for each in orders]
        why = reading.why or _why_unclear(known, batch_size, orders[0])
        if any(each.reduction != reading.reduction for each in others):
            why = why or _AMBIGUOUS
        if any(self._path(factor.grad_fn).depends for factor in term.learned):
            why = why or "is multiplied by a factor that depends on the examples"
        counts = call is not None and (call.reduction != "none" or reading.reduction == "sum")
        return _TermRecord("unknown" if why else reading.reduction, why, call.counted if call and counts else None)

    def _path(self, root: Any) -> _Path:
        """What lies between the layers and a node."""
        path = _Path()
        stack, seen = [root], {root}
        while stack:
            node = stack.pop()
            if node is None:
                continue
            if self._has_layers and LAYER in node.metadata:
                path.depends = True
                continue
            path.nodes.append(node)
            children = [child for child, _ in node.next_functions]
            path.depends |= not self._has_layers and (None in children or "lookup" in self.record.at(node).notes)
            stack += [child for child in children if child not in seen]
            seen.update(children)
        return path


def _why_unclear(path: Iterable[Recorded], batch_size: int | None, order: Order) -> str:
    """Why the examples of the values behind a path are not those of the batch; empty if they are."""
    for known in path:
        if any(Reading(term, batch_size).reduction in {"mean", "sum"} for term in known.terms):
            return "is a function of values that are already reduced over the examples"
        if known.selection is not None and known.selection.kept(batch_size, order) in {"some", "piece"}:
            return "is computed from chosen rows"
    return ""


def _joint(found: Sequence[_TermRecord], batch_size: int | None) -> tuple[str, str]:
    """The reduction that the terms share, and why it is unknown."""
    reductions = {read.reduction for read in found}
    if not found or batch_size == 1:  # one example: mean and sum coincide
        return "mean", ""
    if len(reductions) > 1 or not reductions <= {"mean", "sum"}:
        return "unknown", next((read.why for read in found if read.why), _MIXED)
    return reductions.pop(), ""


def _rows(mask: Tensor | None, batch_size: int | None, order: Order) -> Tensor | None:
    """The examples with a target that counts, ``[B]``; None if all count."""
    if mask is None or not batch_size or not mask.numel() or mask.numel() % batch_size:
        return None
    dim = example_dim(tuple(mask.shape), batch_size, order)
    if dim is not None and mask.shape[dim] == batch_size:
        mask = mask.movedim(dim, 0)
    elif order != "rows":
        mask = mask.reshape(-1, batch_size).T
    return mask.reshape(batch_size, -1).any(1).cpu()
