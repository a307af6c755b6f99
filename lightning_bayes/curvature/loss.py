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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.example_dims import Order, example_dim
from lightning_bayes.curvature.loss_functions import LossCall, LossLink
from lightning_bayes.curvature.loss_terms import Reading, Term
from lightning_bayes.errors import ShapeError, UnsupportedTrainingError

_MIXED: Final = "adds a term reduced by 'sum' to one reduced by 'mean' or rescaled"
_ASSUMED: Final = (
    "The loss does not show how it reduces the examples of a batch, so it counts as a mean over them. Pass "
    "loss_reduction='mean' or 'sum' to state it."
)
Linked: TypeAlias = tuple[LossLink, Any]  # and the autograd node of the outputs that the link belongs to
ReadTerm: TypeAlias = tuple[Term, Reading, set[Linked]]
# "auto_or_mean" is "auto" where the scale of the curvature does not matter: an unknown reduction counts as a mean.
LossReduction: TypeAlias = Literal["auto", "auto_or_mean", "mean", "sum"]


@dataclass(frozen=True, eq=False)
class LossTerm:
    """One term of a loss."""

    name: str
    outputs: Tensor
    targets: Tensor | None
    counted: Tensor | None
    factor: float
    reduction: str
    call: LossCall | None = None


@dataclass(frozen=True, eq=False)
class LossRecord:
    """How one loss reduced its examples."""

    reduction: str = "mean"
    why: str = ""
    terms: tuple[LossTerm, ...] = ()
    link: LossLink | None = None
    call: LossCall | None = None
    linked: Sequence[Any] = ()
    _num_examples: dict[int, int] = field(default_factory=dict, repr=False)  # n by batch size

    def num_examples(self, batch_size: int, order: Order = "rows") -> int:
        """Number of examples that count, n ≥ 1, in a batch of `batch_size` examples."""
        if batch_size not in self._num_examples:
            masks = [term.counted for term in self.terms]
            rows = [_rows(mask, batch_size, order) for mask in masks if _holds(mask, batch_size)]
            counts_all = not rows or len(rows) < len(masks)
            self._num_examples[batch_size] = batch_size if counts_all else max(1, int(torch.stack(rows).any(0).sum()))
        return self._num_examples[batch_size]


def _holds(mask: Tensor | None, batch_size: int) -> TypeGuard[Tensor]:
    return mask is not None and mask.numel() > 0 and mask.numel() % batch_size == 0


def _rows(mask: Tensor, batch_size: int, order: Order) -> Tensor:
    """The examples with a target that counts, ``[B]``."""
    dim = example_dim(tuple(mask.shape), batch_size, order)
    if dim is not None and mask.shape[dim] == batch_size:
        mask = mask.movedim(dim, 0)
    elif order != "rows":
        mask = mask.reshape(-1, batch_size).T
    return mask.reshape(batch_size, -1).any(1).cpu()


def record_of(read: Sequence[ReadTerm], batch_size: int | None) -> LossRecord:
    """The record of the terms that depend on examples."""
    terms = tuple(_loss_term(term, reading) for term, reading, _ in read)
    link = only({only({link for link, _ in links}) for _, _, links in read})
    linked = [node for _, _, links in read for _, node in links]
    reductions = {reading.reduction for _, reading, _ in read}
    if not read or batch_size == 1:  # one example: mean and sum coincide
        return LossRecord("mean", "", terms, link, linked=linked)
    if len(reductions) > 1 or not reductions <= {"mean", "sum"}:
        whys = [reading.why for _, reading, _ in read if reading.why]
        return LossRecord("unknown", whys[0] if whys else _MIXED, terms, link, linked=linked)
    return LossRecord(reductions.pop(), "", terms, link, linked=linked)


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


def _loss_term(term: Term, reading: Reading) -> LossTerm:
    call, reduction = term.call, reading.reduction
    if call is None:
        first = next((step.kind for step in term.steps), "value")
        return LossTerm(first, term.values, None, None, reading.factor, reduction, None)
    counted = call.counted if call.reduction != "none" or reduction == "sum" else None
    name = call.function.__name__
    return LossTerm(name, call.outputs, call.targets, counted, reading.factor, reduction, call)


def only(values: set[Any]) -> Any:
    """The only value of a set; None if there are several or none."""
    return next(iter(values)) if len(values) == 1 else None


class BackwardWatch(TorchFunctionMode):
    """Calls `observe(loss)` before each ``loss.backward()``, for callers that do not pass the loss explicitly."""

    def __init__(self, observe: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._observe = observe

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            self._observe(args[0])
        return func(*args, **(kwargs or {}))
