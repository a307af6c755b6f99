"""What a forward pass computed, noted tensor by tensor as the functions are called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.loss_functions import LOSS_FUNCTIONS, arguments_of, read_call
from lightning_bayes.curvature.loss_terms import Edge, Step, Term
from lightning_bayes.curvature.selections import Selection
from lightning_bayes.curvature.tensor_record import Former, Note, TensorRecord
from lightning_bayes.private_torch import PACK

_IN_PLACE: Final = {Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_}
_OF_DATA: Final = {Tensor.__getitem__, torch.index_select, Tensor.index_select, torch.masked_select, PACK}


def _each(names: str, handler: Any, *first: Any) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    """The handler of the functions and methods of these names."""
    owners = [getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)]
    return {function: (handler, first) for function in owners}


def _with_function(handler: Any, functions: Iterable[Any]) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    return {function: (handler, (function,)) for function in functions}


class LossTape(TensorRecord, TorchFunctionMode):
    """Notes the loss functions, reductions, products, sums and selections inside the context, by autograd node.

    `observe` is called with the loss before each ``loss.backward()``, for callers that do not pass the loss explicitly.
    """

    observe: Callable[[Tensor], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._stances: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Any:
        """Record the functions that are called from now on. Compiled code runs eagerly, because it hides them."""
        has_switch = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
        self._stances.append(torch.compiler.set_stance("force_eager") if has_switch else nullcontext())
        self._stances[-1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stances.pop().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and self.observe is not None:
            self.observe(args[0])
        if func not in self._handlers:
            return func(*args, **kwargs)
        if func in _IN_PLACE:
            former = Former(self.terms_of(args[0]), args[0].requires_grad, args[0].shape)
        result = func(*args, **kwargs)
        if func is Tensor.__iter__:
            result = list(result)
        value = result[0] if isinstance(result, (tuple, list)) and result else result
        value = args[0] if func is Tensor.__setitem__ else value
        if isinstance(value, Tensor) and (value.grad_fn is not None or func in _OF_DATA):
            handler, first = self._handlers[func]
            handler(self, *first, value, *((former, *args[1:]) if func in _IN_PLACE else args), **kwargs)
        return iter(result) if func is Tensor.__iter__ else result

    def _put_loss(self, function: Callable[..., Tensor], value: Tensor, /, *args: Any, **kwargs: Any) -> None:
        call = read_call(function, args, kwargs)
        if call is not None:
            self.put(value, (Term.of(value, call),))

    def _put_reduction(self, kind: str, value: Tensor, /, input: Tensor, *args: Any, **kwargs: Any) -> None:
        dims = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
        keepdim = bool(kwargs.get("keepdim", args[1] if len(args) > 1 else False))
        dims = (dims,) if isinstance(dims, int) else dims
        # Layers such as normalisations keep the dimension; their large inputs are not worth keeping.
        terms = self.terms_of(input) or ((Term.of(value),) if keepdim and input.dim() > 1 else self.all_terms(input))
        edge: Edge | None = None if input.grad_fn is None else (input.grad_fn, input.output_nr)
        shape = () if terms and terms[0].is_stacked else tuple(input.shape)
        self.put(value, terms, Step(kind, dims or None, shape, keepdim, edge))

    def _put_product(self, is_division: bool, value: Tensor, /, input: Any, other: Any, **kwargs: Any) -> None:
        if kwargs.get("rounding_mode"):
            return
        is_first = is_division or self.terms_of(input)
        if not is_first and (self.terms_of(other) or not getattr(input, "requires_grad", False)):
            input, other = other, input
        is_tensor = isinstance(other, Tensor)
        if is_tensor and (other.requires_grad or other.numel() > 1):
            self._put_tensor_product(value, input, other)
            return
        step = Step("mul", other.detach() if is_tensor else other, is_division=is_division)
        self.record(value).factor = step
        if self.terms_of(input) and value.shape == input.shape:
            self.put(value, self.terms_of(input), step)

    def _put_tensor_product(self, value: Tensor, input: Any, other: Tensor) -> None:
        """Record a product with weights or with a learned factor."""
        terms = self.terms_of(input)
        if not terms:
            is_target = isinstance(input, Tensor) and "log_softmax" in self.at(input.grad_fn).notes  # probabilities
            if not other.requires_grad and not is_target:
                self.record(value, "weighted")
        elif value.shape == input.shape and not self.terms_of(other):
            if not other.requires_grad:
                self.put(value, terms, Step("weigh"))
            elif value.numel() == 1 or (value.numel() == other.numel() and all(term.is_stacked for term in terms)):
                self.put(value, terms, Step("scale", other))

    def _put_mask(self, value: Tensor, /, input: Any = None, *args: Any, **kwargs: Any) -> None:
        self.record(value, "weighted")
        if self.terms_of(input) and value.shape == input.shape:
            self.put(value, self.terms_of(input), Step("weigh"))

    def _put_sum(
        self, signs: tuple[int, int], value: Tensor, /, input: Any, other: Any, *, alpha: float = 1, **_: Any
    ) -> None:
        if not self.terms_of(input) and not self.terms_of(other):
            return
        if isinstance(input, Former) and not input.terms and input.requires_grad:
            return
        terms: tuple[Term, ...] = ()
        for part, factor in ((input, signs[0]), (other, signs[1] * alpha)):
            if isinstance(part, (Tensor, Former)) and part.requires_grad and part.shape != value.shape:
                return
            of_part = self.all_terms(part)
            terms += of_part if factor == 1 else tuple(term.then(Step("mul", factor)) for term in of_part)
        self.put(value, terms)

    def _put_same(self, value: Tensor, /, input: Tensor, *args: Any, **kwargs: Any) -> None:
        recorded, terms = self.record(value, "moved"), self.terms_of(input)
        if value.shape == input.shape or value.numel() == input.numel() == 1:
            recorded.factor = self.at(input.grad_fn).factor
            if terms:
                self.put(value, terms)

    def _put_function(self, value: Tensor, /, input: Any = None, *args: Any, **kwargs: Any) -> None:
        terms = self.terms_of(input)
        if terms and value.numel() == 1 and input.numel() == 1:
            self.put(value, terms, Step("map"))

    def _put_joined(self, value: Tensor, /, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> None:
        size = tensors[0].shape[dim] if tensors[0].dim() == value.dim() else 0
        self._select(value, value, lambda numbers: numbers.narrow(dim, 0, size))
        self._put_stack(value, tensors)

    def _put_stack(self, value: Tensor, /, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        self.record(value, "join")
        if value.numel() == len(tensors) and any(self.terms_of(one) for one in tensors):
            self.put(value, tuple(t for one in tensors for t in self.all_terms(one)), Step("stack"))

    def _put_log_softmax(
        self, value: Tensor, /, input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if dim is not None and dim % max(input.dim(), 1) == 1:
            self.record(value, "log_softmax")

    def _put_negative(self, value: Tensor, input: Tensor) -> None:
        self._put_product(False, value, input, -1)

    def _put_selection(self, function: Any, value: Tensor, /, input: Tensor, *args: Any, **kwargs: Any) -> None:
        index = args[0] if function is Tensor.__getitem__ else None
        items = index if isinstance(index, tuple) else (index,)
        by_tensor = function in _OF_DATA and (index is None or any(isinstance(item, (Tensor, list)) for item in items))
        if input.dim() and (by_tensor or value.grad_fn is not None):
            self._select(value, input, lambda numbers: function(numbers, *args, **kwargs), by_tensor)
            self._put_same(value, input)

    def _put_over(
        self, first: int, value: Tensor, /, input: Tensor, *args: Any, dim: Any = None, **kwargs: Any
    ) -> None:
        """Record a function of all entries in some dimensions, such as a variance, as a selection of one of them."""
        given = [arg for arg in args[first:] if isinstance(arg, (int, tuple, list))] if dim is None else [dim]
        dims = given[0] if given and not isinstance(given[0], bool) else ()
        if input.dim() and not any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
            self._select(value, input, lambda numbers: numbers.amax(dims))

    def _select(self, value: Tensor, input: Tensor, select: Callable[[Tensor], Any], by_tensor: bool = False) -> None:
        self.record(value).selection = Selection(tuple(input.shape), select, value.device, by_tensor)

    def _put_scattered(
        self, function: Any, value: Tensor, /, input: Any, index: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        items = index if isinstance(index, tuple) else (index,)
        if function is not Tensor.__setitem__ or any(isinstance(item, Tensor) for item in items):
            self.record(value, "scatter")

    def _put_lookup(self, function: Callable[..., Tensor], value: Tensor, /, *args: Any, **kwargs: Any) -> None:
        given = arguments_of(function, args, kwargs)
        self.paddings.setdefault(given["weight"], set()).add(given.get("padding_idx"))
        self.record(value, "lookup")

    def _put_norm(self, value: Tensor, /, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("training", len(args) > 5 and args[5]):
            self.record(value, "batch_norm")

    def _put_note(self, note: Note, value: Tensor, /, *args: Any, **kwargs: Any) -> None:
        self.record(value, note)

    _handlers: ClassVar[dict[Any, tuple[Any, tuple[Any, ...]]]] = {
        **_with_function(_put_loss, LOSS_FUNCTIONS),
        **_each("mean nanmean", _put_reduction, "mean"),
        **_each("sum nansum", _put_reduction, "sum"),
        **_each("mul mul_ multiply", _put_product, False),
        **_each("div div_ divide true_divide", _put_product, True),
        **_each("add add_", _put_sum, (1, 1)),
        **_each("sub sub_ subtract", _put_sum, (1, -1)),
        **_each("rsub __rsub__", _put_sum, (-1, 1)),
        **_each("neg negative", _put_negative),
        **_each("clone contiguous float double half bfloat16 to type type_as", _put_same),
        **_each("view view_as reshape squeeze unsqueeze flatten", _put_same),
        **_each("sqrt exp log log1p expm1 square pow abs clamp clamp_min relu tanh sigmoid", _put_function),
        **_each("stack", _put_stack),
        **_each("cat concat concatenate", _put_joined),
        **_each("log_softmax", _put_log_softmax),
        F.log_softmax: (_put_log_softmax, ()),
        **_with_function(
            _put_selection,
            _each(
                "__getitem__ masked_select select unbind __iter__ index_select narrow split chunk tensor_split", None
            ),
        ),
        **_with_function(_put_selection, _each("topk flip roll", None)),
        **_each("sort cumsum var std logsumexp amax amin max min prod median", _put_over, 0),
        **_each("norm", _put_over, 1),  # after the exponent
        **_each("masked_fill where", _put_mask),
        **_each("permute transpose swapaxes swapdims movedim moveaxis t unflatten gather expand", _put_note, "moved"),
        **_with_function(
            _put_scattered,
            _each(
                "__setitem__ index_put index_put_ index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add "
                "scatter_add_ masked_scatter masked_scatter_",
                None,
            ),
        ),
        **_with_function(_put_lookup, (F.embedding, F.embedding_bag)),
        **_each("batch_norm", _put_norm),
        F.batch_norm: (_put_norm, ()),
        PACK: (_put_note, ("pack",)),
    }
