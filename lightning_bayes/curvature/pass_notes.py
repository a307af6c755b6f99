"""Operations of a forward pass that move, divide, join or mix values: `LossTape` notes their calls.

moved       the values are those of the input, elsewhere or in another dtype
select      rows that a tensor chooses
scatter     rows written to positions that a tensor chooses
pack        rows of packed sequences
join        a stack or a concatenation
lookup      rows of a table, which no gradient ties to the examples that chose them
batch_norm  normalised by statistics of the batch
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

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
NOTED: Final[dict[Any, set[Note]]] = {
    function: {note for note, functions in _FUNCTIONS.items() if function in functions}
    for function in set().union(*_FUNCTIONS.values())
}


def notes_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[Note]:
    """The notes of a call of a function in `NOTED`."""
    if function in {Tensor.__getitem__, Tensor.__setitem__}:
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        return NOTED[function] if any(isinstance(item, Tensor) for item in items) else NOTED[function] & {"moved"}
    is_eval = "batch_norm" in NOTED[function] and not kwargs.get("training", len(args) > 5 and args[5])
    return set() if is_eval else NOTED[function]
