"""Operations of a forward pass that move, divide, join or mix values, noted as they are called.

moved       the values are those of the input, elsewhere or in another dtype
select      rows that a tensor chooses
scatter     rows written to positions that a tensor chooses
pack        rows of packed sequences
join        a stack or a concatenation
lookup      rows of a table, which no gradient ties to the examples that chose them
batch_norm  normalised by statistics of the batch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.private_torch import PACK

Note: TypeAlias = Literal["moved", "select", "scatter", "pack", "join", "lookup", "batch_norm"]


def _each(names: str) -> set[Any]:
    """The functions and methods of these names."""
    return {getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)}


_FUNCTIONS: Final[dict[Note, set[Any]]] = {
    "moved": _each(
        "permute transpose swapaxes swapdims movedim moveaxis t unflatten gather expand clone contiguous float double half "
        "bfloat16 to type type_as view view_as reshape squeeze unsqueeze flatten __getitem__ masked_select select unbind "
        "__iter__ index_select narrow split chunk tensor_split topk flip roll"
    ),
    "select": _each("__getitem__ index_select masked_select"),
    "scatter": _each("__setitem__ index_put index_put_ index_add index_add_ index_copy index_copy_ scatter scatter_")
    | _each("scatter_add scatter_add_ masked_scatter masked_scatter_"),
    "pack": {PACK},
    "join": _each("stack cat concat concatenate"),
    "lookup": {F.embedding, F.embedding_bag},
    "batch_norm": _each("batch_norm") | {F.batch_norm},
}
NOTED: Final[set[Any]] = set().union(*_FUNCTIONS.values())


class PassNotes:
    """The noted operations of one forward pass."""

    def __init__(self) -> None:
        self.nodes: dict[Note, set[Any]] = {note: set() for note in get_args(Note)}  # of autograd
        self.selected_data: list[Tensor] = []  # selected or packed rows without gradients

    def add(self, function: Callable[..., Any], value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of a function in `NOTED`, and its first result or the tensor that it changed."""
        notes = {note for note, functions in _FUNCTIONS.items() if function in functions}
        if function in {Tensor.__getitem__, Tensor.__setitem__} and not _holds_tensor(args[1]):
            notes -= {"select", "scatter"}
        if "batch_norm" in notes and not kwargs.get("training", len(args) > 5 and args[5]):
            return
        if value.grad_fn is None and notes & {"select", "pack"}:
            self.selected_data.append(value)
        elif value.grad_fn is not None:
            for note in notes:
                self.nodes[note].add(value.grad_fn)

    def clear(self) -> None:
        """Forget the pass."""
        for nodes in self.nodes.values():
            nodes.clear()
        self.selected_data.clear()


def _holds_tensor(index: Any) -> bool:
    return any(isinstance(item, Tensor) for item in (index if isinstance(index, tuple) else (index,)))
