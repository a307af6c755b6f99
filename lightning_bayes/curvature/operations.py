"""The operations of a forward pass that a `Tape` notes: each has a function that completes the record of its result.

The functions get the record, their own arguments, the first result, and the arguments of the call, where a `Value` stands
for each tensor with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.curvature.loss_terms import Edge, Step, Term, Value
from lightning_bayes.curvature.tensor_record import Note, TensorRecord
from lightning_bayes.likelihood.example_dims import Selection
from lightning_bayes.likelihood.loss_functions import LOSS_FUNCTIONS, read_call
from lightning_bayes.private_torch import PACK

Handlers: TypeAlias = dict[Any, tuple[Any, tuple[Any, ...]]]  # a function and its first arguments, by operation

DATA: Final = Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor
LOOK_UPS: Final = (F.embedding, F.embedding_bag)
IN_PLACE: Final = {Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_}
OF_DATA: Final = {Tensor.__getitem__, torch.index_select, Tensor.index_select, torch.masked_select, PACK}


def _loss(record: TensorRecord, function: Callable[..., Tensor], value: Value, /, *args: Any, **kwargs: Any) -> None:
    call = read_call(function, args, kwargs)
    if call is not None:
        record.put(value, (Term.of(value, call),))


def _reduction(record: TensorRecord, kind: str, value: Value, /, input: Value, *args: Any, **kwargs: Any) -> None:
    dims = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    keepdim = bool(kwargs.get("keepdim", args[1] if len(args) > 1 else False))
    dims = (dims,) if isinstance(dims, int) else dims
    terms = record.terms_of(input) or ((Term.of(value),) if keepdim and input.dim() > 1 else record.all_terms(input))
    edge: Edge | None = None if input.grad_fn is None else (input.grad_fn, input.output_nr)
    shape = () if terms and terms[0].is_stacked else input.shape
    record.put(value, terms, Step(kind, dims or None, shape, keepdim, edge))


def _product(
    record: TensorRecord, is_division: bool, value: Value, /, input: Any, other: Any = -1, **kwargs: Any
) -> None:
    if kwargs.get("rounding_mode"):
        return
    is_first = is_division or record.terms_of(input)
    if not is_first and (record.terms_of(other) or not getattr(input, "requires_grad", False)):
        input, other = other, input
    is_tensor = isinstance(other, (Tensor, Value))
    if is_tensor and (other.requires_grad or other.numel() > 1):
        _tensor_product(record, value, input, other)
        return
    step = Step("mul", other.detach() if is_tensor else other, is_division=is_division)
    record.note(value).factor = step
    if record.terms_of(input) and value.shape == input.shape:
        record.put(value, record.terms_of(input), step)


def _tensor_product(record: TensorRecord, value: Value, input: Any, other: Any) -> None:
    """Record a product with weights or with a learned factor."""
    terms = record.terms_of(input)
    if not terms:
        is_target = isinstance(input, Value) and "log_softmax" in record.at(input.grad_fn).notes  # probabilities
        if not other.requires_grad and not is_target:
            record.note(value, "weighted")
    elif value.shape == input.shape and not record.terms_of(other):
        if not other.requires_grad:
            record.put(value, terms, Step("weigh"))
        elif value.numel() == 1 or (value.numel() == other.numel() and all(term.is_stacked for term in terms)):
            record.put(value, tuple(replace(term, learned=(*term.learned, other)) for term in terms), Step("scale"))


def _mask(record: TensorRecord, value: Value, /, input: Any = None, *args: Any, **kwargs: Any) -> None:
    record.note(value, "weighted")
    if record.terms_of(input) and value.shape == input.shape:
        record.put(value, record.terms_of(input), Step("weigh"))


def _sum(
    record: TensorRecord,
    signs: tuple[int, int],
    value: Value,
    /,
    input: Any,
    other: Any,
    *,
    alpha: float = 1,
    **_: Any,
) -> None:
    if not record.terms_of(input) and not record.terms_of(other):
        return
    terms: tuple[Term, ...] = ()
    for part, factor in ((input, signs[0]), (other, signs[1] * alpha)):
        if isinstance(part, Value) and part.requires_grad and part.shape != value.shape:
            return
        of_part = record.all_terms(part)
        terms += of_part if factor == 1 else tuple(term.then(Step("mul", factor)) for term in of_part)
    record.put(value, terms)


def _same(record: TensorRecord, value: Value, /, input: Value, *args: Any, **kwargs: Any) -> None:
    recorded, terms = record.note(value, "moved"), record.terms_of(input)
    record.note_path(value, input, "moved")
    if value.shape == input.shape or value.numel() == input.numel() == 1:
        recorded.factor = record.at(input.grad_fn).factor
        if terms:
            record.put(value, terms)


def _function(record: TensorRecord, value: Value, /, input: Any = None, *args: Any, **kwargs: Any) -> None:
    terms = record.terms_of(input)
    if terms and value.numel() == 1 and input.numel() == 1:
        record.put(value, terms, Step("map"))


def _joined(record: TensorRecord, value: Value, /, tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> None:
    size = next((one.shape[dim] for one in tensors if one.numel()), 0)  # a cache may start with an empty tensor
    record.note(value).selection = Selection.of(value, lambda numbers: numbers.narrow(dim, 0, size))
    _stack(record, value, tensors)


def _stack(record: TensorRecord, value: Value, /, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    record.note(value, "join")
    if value.numel() == len(tensors) and any(record.terms_of(one) for one in tensors):
        record.put(value, tuple(t for one in tensors for t in record.all_terms(one)), Step("stack"))


def _log_softmax(
    record: TensorRecord, value: Value, /, input: Value, dim: int | None = None, *args: Any, **kwargs: Any
) -> None:
    if dim is not None and dim % max(input.dim(), 1) == 1:
        record.note(value, "log_softmax")


def _selection(record: TensorRecord, function: Any, value: Value, /, input: Value, *args: Any, **kwargs: Any) -> None:
    index = args[0] if function is Tensor.__getitem__ else None
    items = index if isinstance(index, tuple) else (index,)
    by_tensor = function in OF_DATA and (index is None or any(isinstance(item, (Tensor, list)) for item in items))
    if input.dim() and (by_tensor or value.grad_fn is not None):
        record.note(value).selection = Selection.of(input, lambda rows: function(rows, *args, **kwargs), by_tensor)
        _same(record, value, input)


def _over(
    record: TensorRecord, first: int, value: Value, /, input: Value, *args: Any, dim: Any = None, **kwargs: Any
) -> None:
    """Record a function of all entries in some dimensions, such as a variance, as a selection of one of them."""
    given = [arg for arg in args[first:] if isinstance(arg, (int, tuple, list))] if dim is None else [dim]
    dims = given[0] if given and not isinstance(given[0], bool) else ()
    if input.dim() and not any(isinstance(arg, (Tensor, Value)) for arg in (*args, *kwargs.values())):
        record.note(value).selection = Selection.of(input, lambda numbers: numbers.amax(dims))


def _scattered(
    record: TensorRecord, function: Any, value: Value, /, input: Any, index: Any = None, *args: Any, **kwargs: Any
) -> None:
    items = index if isinstance(index, tuple) else (index,)
    if function is not Tensor.__setitem__ or any(isinstance(item, Tensor) for item in items):
        record.note(value, "scatter")


def _norm(record: TensorRecord, value: Value, /, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("training", len(args) > 5 and args[5]):
        record.note(value, "batch_norm")


def _note(record: TensorRecord, note: Note, value: Value, /, *args: Any, **kwargs: Any) -> None:
    record.note(value, note)


def _each(names: str, handler: Any, *first: Any) -> Handlers:
    """The handler of the functions and methods of these names."""
    owners = [getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)]
    return {function: (handler, first) for function in owners}


def _with_function(handler: Any, functions: Iterable[Any]) -> Handlers:
    """A handler that gets the function first."""
    return {function: (handler, (function,)) for function in functions}


OPERATIONS: Final[Handlers] = {
    **_with_function(_loss, LOSS_FUNCTIONS),
    **_each("mean nanmean", _reduction, "mean"),
    **_each("sum nansum", _reduction, "sum"),
    **_each("mul mul_ multiply", _product, False),
    **_each("div div_ divide true_divide", _product, True),
    **_each("add add_", _sum, (1, 1)),
    **_each("sub sub_ subtract", _sum, (1, -1)),
    **_each("rsub __rsub__", _sum, (-1, 1)),
    **_each("neg negative", _product, False),
    **_each("clone contiguous float double half bfloat16 to type type_as", _same),
    **_each("view view_as reshape squeeze unsqueeze flatten", _same),
    **_each("sqrt exp log log1p expm1 square pow abs clamp clamp_min relu tanh sigmoid", _function),
    **_each("stack", _stack),
    **_each("cat concat concatenate", _joined),
    **_each("log_softmax", _log_softmax),
    F.log_softmax: (_log_softmax, ()),
    **_with_function(
        _selection,
        _each("__getitem__ masked_select select unbind __iter__ index_select narrow split chunk tensor_split", None),
    ),
    **_with_function(_selection, _each("topk flip roll", None)),
    **_each("sort cumsum var std logsumexp amax amin max min prod median", _over, 0),
    **_each("norm", _over, 1),  # after the exponent
    **_each("masked_fill where", _mask),
    **_each("permute transpose swapaxes swapdims movedim moveaxis t unflatten gather expand", _note, "moved"),
    **_with_function(
        _scattered,
        _each(
            "__setitem__ index_put index_ index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add "
            "scatter_add_ masked_scatter masked_scatter_",
            None,
        ),
    ),
    **{function: (_note, ("lookup",)) for function in LOOK_UPS},
    **_each("batch_norm", _norm),
    F.batch_norm: (_norm, ()),
    PACK: (_note, ("pack",)),
}


def _handled_by(*handlers: Any) -> set[Any]:
    return {function for function, (handler, _) in OPERATIONS.items() if handler in handlers}


MAKE_TERMS: Final = _handled_by(_loss, _reduction)
OF_TERMS: Final = _handled_by(_sum, _function)  # which do nothing to values without terms
BY_NUMBER: Final = _handled_by(_product)  # whose reading depends on a number
BY_INDEX: Final = _handled_by(_selection)  # whose reading depends on indices
