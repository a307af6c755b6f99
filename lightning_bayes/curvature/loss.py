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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.loss_functions import LossCall, LossLink
from lightning_bayes.curvature.loss_terms import Reading, Term

ReadTerm: TypeAlias = tuple[Term, Reading, set[LossLink]]
LossReduction: TypeAlias = Literal["auto", "mean", "sum"]


@dataclass(frozen=True, eq=False)
class LossTerm:
    """One term of a loss.

    Attributes:
        name: The loss function, or ``"mean"`` or ``"sum"`` for other values.
        outputs: The tensor whose rows are the examples: the argument of the loss function, or the reduced values.
        targets: The targets of the loss function; None if unknown.
        counted: Mask of the targets that count, in their shape; None if all count.
        factor: The product of the numbers that multiply the term.
        reduction: ``"mean"``, ``"sum"`` or ``"unknown"``.
        call: The call of the loss function; None for other values.
        learned: The tensors with gradients that multiply the term.
    """

    name: str
    outputs: Tensor
    targets: Tensor | None
    counted: Tensor | None
    factor: float
    reduction: str
    call: LossCall | None = None
    learned: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class LossRecord:
    """How one loss reduced its examples.

    Attributes:
        reduction: ``"mean"``, ``"sum"`` or ``"unknown"``.
        why: Why it is unknown, as the predicate of a sentence about the loss.
        terms: The terms that depend on the examples.
        link: The link from the outputs to predictions; None if unknown.
        call: The call of the only loss function, if nothing but numbers changed its result; its likelihood is known.
    """

    reduction: str = "mean"
    why: str = ""
    terms: tuple[LossTerm, ...] = ()
    link: LossLink | None = None
    call: LossCall | None = None
    _num_examples: dict[int, int] = field(default_factory=dict, repr=False)  # n by batch size

    def num_examples(self, batch_size: int) -> int:
        """Number of examples that count, n ≥ 1, in a batch of `batch_size` examples."""
        if batch_size not in self._num_examples:
            masks = [term.counted for term in self.terms]
            rows = [mask.reshape(batch_size, -1).any(1).cpu() for mask in masks if _holds(mask, batch_size)]
            counts_all = not rows or len(rows) < len(masks)
            self._num_examples[batch_size] = batch_size if counts_all else max(1, int(torch.stack(rows).any(0).sum()))
        return self._num_examples[batch_size]


def _holds(mask: Tensor | None, batch_size: int) -> TypeGuard[Tensor]:
    return mask is not None and mask.numel() > 0 and mask.numel() % batch_size == 0


def record_of(read: Sequence[ReadTerm], batch_size: int | None) -> LossRecord:
    """The record of the terms that depend on examples."""
    terms = tuple(_loss_term(term, reading) for term, reading, _ in read)
    link = only({only(links) for _, _, links in read})
    reductions = {reading.reduction for _, reading, _ in read}
    why = next((reading.why for _, reading, _ in read if reading.why), "")
    if not read or batch_size == 1:
        return LossRecord("mean", "", terms, link, _single_call(read))
    if len(reductions) > 1 or not reductions <= {"mean", "sum"}:
        why = why or "adds a term reduced by 'sum' to one reduced by 'mean' or rescaled"
        return LossRecord("unknown", why, terms, link)
    return LossRecord(reductions.pop(), "", terms, link, _single_call(read))


def _single_call(read: Sequence[ReadTerm]) -> LossCall | None:
    return read[0][0].call if len(read) == 1 and read[0][0].is_plain else None


def _loss_term(term: Term, reading: Reading) -> LossTerm:
    call, reduction = term.call, reading.reduction
    if call is None:
        first = next((step.kind for step in term.steps), "value")
        return LossTerm(first, term.values, None, None, reading.factor, reduction, None, tuple(term.learned))
    counted = call.counted if call.reduction != "none" or reduction == "sum" else None
    name = call.function.__name__
    return LossTerm(name, call.outputs, call.targets, counted, reading.factor, reduction, call, tuple(term.learned))


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
