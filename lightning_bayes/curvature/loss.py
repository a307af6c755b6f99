"""The record of a loss: what it reduced, and how, as its functions were called.

Backward through a batch loss L yields every example's *contribution* c_i to the gradient. The per-example gradient g_i
depends on how L reduces the per-example losses ℓ_i:

    reduction="mean":  L = (1/n) Σ ℓ_i    →    g_i = n c_i        mean_i g_i² = n   Σ c_i²
    reduction="sum":   L =       Σ ℓ_i    →    g_i =   c_i        mean_i g_i² = 1/n Σ c_i²

n is the number of examples that count; an example whose targets are all `ignore_index` does not. `LossRecorder` records
PyTorch's loss functions, means and sums, the sums of these, and their products with numbers. The reduction of any other loss
is unknown.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from lightning_bayes.curvature.example_dims import Order, example_dim, outer_size
from lightning_bayes.curvature.loss_functions import LossCall, LossLink
from lightning_bayes.curvature.loss_tape import LossTape
from lightning_bayes.curvature.loss_terms import Edge, Term
from lightning_bayes.errors import ShapeError, UnsupportedTrainingError
from lightning_bayes.private_torch import without_torch_functions

_NOT_RECORDED: Final = "is computed by a function that is not recorded"
_MIXED: Final = "adds a term reduced by 'sum' to one reduced by 'mean' or rescaled"
_AMBIGUOUS: Final = "is computed from values that may hold the examples in dimension 0 or 1"
_ASSUMED: Final = (
    "The loss does not show how it reduces the examples of a batch, so it counts as a mean over them. Pass "
    "loss_reduction='mean' or 'sum' to state it."
)
Linked: TypeAlias = tuple[LossLink, Any]  # and the autograd node of the outputs that the link belongs to
# "auto_or_mean" is "auto" where the scale of the curvature does not matter: an unknown reduction counts as a mean.
LossReduction: TypeAlias = Literal["auto", "auto_or_mean", "mean", "sum"]


@dataclass(frozen=True, eq=False)
class LossRecord:
    """How one loss reduced its examples."""

    reduction: str = "mean"
    why: str = ""  # predicate of a sentence about the loss, if the reduction is unknown
    num_counted: int | None = None  # n ≥ 1; None if all examples count
    link: LossLink | None = None
    linked: Sequence[Any] = ()  # the nodes of the outputs that the link belongs to
    call: LossCall | None = None  # if the loss is the result of one call
    host_factor: float = 1.0  # by which the training loop multiplied the loss


@dataclass(frozen=True)
class RecordedRows:
    """Where the values that a loss reduces hold the examples."""

    outer: dict[Edge, int]  # the values are [outer, B, inner]
    has_lone_pieces: bool = False  # whether a term depends on one piece of the rows, such as ``v[:n]``, and on no other


class _TermRecord(NamedTuple):
    """How one term reduces its examples."""

    reduction: str
    why: str
    links: set[Linked]
    counted: Tensor | None


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
        if loss.grad_fn is None:
            return LossRecord()
        node = self.node_of(loss)
        known = self.at(node)
        last = known.factor if divided_by_host else None
        terms = known.terms if last is None else tuple(replace(t, steps=t.steps[:-1]) for t in known.terms)
        with without_torch_functions():
            found = [read for term in terms if (read := self._read_term(term, batch_size, order)) is not None]
            by_term = [read.links for read in found] if terms else [self._links_of(self._path(node))]
            counted = _num_counted([read.counted for read in found], batch_size, order or "rows")
        reduction, why = _joint(found, batch_size) if terms or batch_size == 1 else ("unknown", _NOT_RECORDED)
        return LossRecord(
            reduction,
            why,
            counted,
            only({only({link for link, _ in links}) for links in by_term}),
            [node for links in by_term for _, node in links],
            terms[0].call if len(terms) == 1 and not terms[0].steps else None,
            1.0 if last is None else last.factor,
        )

    def rows(self, loss: Tensor, batch_size: int, order: Order) -> RecordedRows | None:
        """Where the values that a loss reduces hold B examples in this order; None if that is not recorded."""
        outer: dict[Edge, int] = {}
        is_lone = False
        if loss.grad_fn in self._declared:
            return self._declared[loss.grad_fn]
        for term in self.terms_of(loss):
            if not self._path(term.outputs.grad_fn).depends:
                continue
            pieces: set[Edge] = set()
            for edge, size in self._rows_of(term, batch_size, order):
                nodes = self._path(edge[0]).nodes
                kept = {node: chosen.kept(batch_size, order) for node in nodes if (chosen := self.at(node).selection)}
                if size is None or {"some", "permuted"}.intersection(kept.values()):
                    return None
                if "piece" in kept.values():
                    pieces.update(each for node in nodes for each in node.next_functions if each[0] in kept)
                outer[edge] = size
            is_lone |= len(pieces) == 1
        return RecordedRows(outer, is_lone) if outer else None

    def scaled(self, loss: Tensor) -> list[Term]:
        """The terms of a loss that are linear in their values and scaled by learned factors, which no example enters."""
        terms = [term for term in self.terms_of(loss) if term.learned and term.is_linear and term.is_unchanged]
        return [term for term in terms if not any(self._path(factor.grad_fn).depends for factor in term.learned)]

    def sizes(self, loss: Tensor) -> list[int]:
        """Numbers of rows of the values that a loss reduces."""
        return [len(value) for term in self.terms_of(loss) for value in (term.outputs, term.values) if value.dim()]

    def clear(self) -> None:
        """See `LossTape.clear`."""
        super().clear()
        self._declared.clear()

    def _rows_of(self, term: Term, batch_size: int, order: Order) -> Iterator[tuple[Edge, int | None]]:
        """The values of a term that hold the examples, and their `outer_size`; None if they do not fit."""
        call = term.call
        if call is None or call.reduction == "none":
            yield term.read(batch_size, order).rows or (term.edge, None)
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
        links: set[Linked] = {(call.link, call.outputs.grad_fn)} if call and call.link else self._links_of(path)
        # Embeddings and indexing take the examples as integers, of which the graph has no trace.
        if not path.depends and (self._is_layer is not None or not (call or links)):
            return None
        inner = [known.factor.factor for node in path.nodes if (known := self.at(node)).factor is not None]
        is_weighted = any(self.noted("weighted", path.nodes))
        orders: tuple[Order, ...] = ("rows", "second") if order is None else (order,)
        reading, *others = [term.read(batch_size, each, inner, is_weighted) for each in orders]
        why = reading.why or self._why_unclear(path, batch_size, orders[0])
        if any(each.reduction != reading.reduction for each in others):
            why = why or _AMBIGUOUS
        if any(self._path(factor.grad_fn).depends for factor in term.learned):
            why = why or "is multiplied by a factor that depends on the examples"
        counts = call is not None and (call.reduction != "none" or reading.reduction == "sum")
        return _TermRecord(
            "unknown" if why else reading.reduction, why, links, call.counted if call and counts else None
        )

    def _why_unclear(self, path: _Path, batch_size: int | None, order: Order) -> str:
        """Why the examples of the values behind a path are not those of the batch; empty if they are."""
        for known in map(self.at, path.nodes):
            if any(term.read(batch_size).reduction in {"mean", "sum"} for term in known.terms):
                return "is a function of values that are already reduced over the examples"
            if known.selection is not None and known.selection.kept(batch_size, order) in {"some", "piece"}:
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
            path.depends |= self._is_layer is None and (None in children or "lookup" in self.at(node).notes)
            stack += [child for child in children if child not in seen]
            seen.update(children)
        return path

    def _links_of(self, path: _Path) -> set[Linked]:
        """The links of the loss functions on a path, or of its log-probabilities, and the nodes that they act on."""
        calls = [term.call for node in path.nodes for term in self.at(node).terms if term.call is not None]
        links: set[Linked] = {(call.link, call.outputs.grad_fn) for call in calls if call.link is not None}
        return links or {("softmax", node) for node in self.noted("log_softmax", path.nodes)}


def settled(record: LossRecord, reduction: LossReduction, batch_size: int | None) -> LossRecord:
    """The record with the declared reduction, or with a mean where an unknown one may count as a mean; else an error."""
    if reduction in {"mean", "sum"}:
        return replace(record, reduction=reduction)
    if record.reduction != "unknown" or batch_size is None:  # no layer saw an example
        return record
    if reduction == "auto_or_mean":
        warnings.warn(_ASSUMED, stacklevel=3)
        return replace(record, reduction="mean")
    raise UnsupportedTrainingError(
        f"The loss {record.why} in a batch of {batch_size} examples, so it may be a mean or a sum over them. Pass "
        "loss_reduction='mean' or 'sum', take the .mean() over the examples, or return the per-example losses as well: "
        '{"loss": loss, "per_example_loss": losses}.'
    )


def require_scalar(loss: Tensor) -> None:
    """Raise `ShapeError` unless the loss is a scalar."""
    if loss.numel() != 1:
        raise ShapeError(f"The loss has shape {tuple(loss.shape)}; backward needs a scalar. Reduce it with .mean().")


def only(values: set[Any]) -> Any:
    """The only value of a set; None if there are several or none."""
    return next(iter(values)) if len(values) == 1 else None


def _joint(found: Sequence[_TermRecord], batch_size: int | None) -> tuple[str, str]:
    """The reduction that the terms share, and why it is unknown."""
    reductions = {read.reduction for read in found}
    if not found or batch_size == 1:  # one example: mean and sum coincide
        return "mean", ""
    if len(reductions) > 1 or not reductions <= {"mean", "sum"}:
        return "unknown", next((read.why for read in found if read.why), _MIXED)
    return reductions.pop(), ""


def _num_counted(masks: Sequence[Tensor | None], batch_size: int | None, order: Order) -> int | None:
    """Number of examples with a target that counts in some term, at least 1; None if all count."""
    fitting = [
        mask for mask in masks if mask is not None and batch_size and mask.numel() and not mask.numel() % batch_size
    ]
    if not batch_size or not fitting or len(fitting) < len(masks):
        return None
    return max(1, int(torch.stack([_rows(mask, batch_size, order) for mask in fitting]).any(0).sum()))


def _rows(mask: Tensor, batch_size: int, order: Order) -> Tensor:
    """The examples with a target that counts, ``[B]``."""
    dim = example_dim(tuple(mask.shape), batch_size, order)
    if dim is not None and mask.shape[dim] == batch_size:
        mask = mask.movedim(dim, 0)
    elif order != "rows":
        mask = mask.reshape(-1, batch_size).T
    return mask.reshape(batch_size, -1).any(1).cpu()
