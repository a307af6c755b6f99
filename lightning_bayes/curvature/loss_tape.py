"""What a forward pass computed of its losses, noted as the functions are called."""

from __future__ import annotations

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature import loss_choices as choices
from lightning_bayes.curvature.example_dims import Order, Shape
from lightning_bayes.curvature.loss import LossRecord
from lightning_bayes.curvature.loss_functions import LOSS_FUNCTIONS, read_call
from lightning_bayes.curvature.loss_terms import Edge, Step, Term
from lightning_bayes.curvature.pass_notes import NOTED, Note, notes_of
from lightning_bayes.private_torch import DDP_SINK, output_shapes


def _each(names: str, handler: Any, *first: Any) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    """The handler of the functions and methods of these names."""
    owners = [getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)]
    return {function: (handler, first) for function in owners}


def _losses(handler: Any) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    return {function: (handler, (function,)) for function in LOSS_FUNCTIONS}


def _edge(value: Tensor) -> Edge | None:
    return None if value.grad_fn is None else (value.grad_fn, value.output_nr)


def _factor(product: Tensor, factor: Tensor) -> Edge:
    """The node of a product, and the position of a factor among its inputs."""
    edge = get_gradient_edge(factor)
    node: Any = product.grad_fn
    return node, [tuple(child) for child in node.next_functions].index((edge.node, edge.output_nr))


class _Former(NamedTuple):
    """A tensor before an operation changed it in place."""

    terms: tuple[Term, ...] | None
    requires_grad: bool
    shape: Shape


_IDENTITIES = {f"{DDP_SINK}Backward", "BackwardHookFunctionBackward"}
_IN_PLACE = {Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_}


class LossTape(TorchFunctionMode, ABC):
    """Notes the loss functions, reductions, products, sums and selections inside the context, by autograd node."""

    def __init__(self) -> None:
        super().__init__()
        self.terms: dict[Any, tuple[Term, ...]] = {}  # of recorded values
        self.before: dict[Any, tuple[Term, ...]] = {}  # the terms before a product with a number
        self.choices: dict[Any, tuple[Shape, Any]] = {}  # shapes, and the indices of what was selected from them
        self._stances: list[AbstractContextManager[Any]] = []
        self.numbers: dict[Any, Any] = {}  # numbers that multiplied other values
        self.weighted: set[Any] = set()  # nodes of values with constant factors or masks
        self.log_softmax: set[Any] = set()  # nodes of log-probabilities of classes
        self.noted: dict[Note, set[Any]] = {note: set() for note in get_args(Note)}  # nodes
        self.selected_data: list[Tensor] = []  # selected or packed rows without gradients
        self.paddings: dict[Tensor, set[int | None]] = {}  # padding_idx of the look-ups in each table

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
        if func not in self._handlers and func not in NOTED:
            return func(*args, **kwargs)
        is_in_place = func in _IN_PLACE
        former = _Former(self._known(args[0]), args[0].requires_grad, args[0].shape) if is_in_place else None
        result = func(*args, **kwargs)
        if func is Tensor.__iter__:
            result = list(result)
        value = result[0] if isinstance(result, (tuple, list)) and result else result
        value = args[0] if func is Tensor.__setitem__ else value
        if isinstance(value, Tensor) and value.grad_fn is not None and func in self._handlers:
            handler, first = self._handlers[func]
            handler(self, *first, value, *(args if former is None else (former, *args[1:])), **kwargs)
        if isinstance(value, Tensor) and func in NOTED:
            self._note(func, value, args, kwargs)
        return iter(result) if func is Tensor.__iter__ else result

    @abstractmethod
    def read(
        self, loss: Tensor, batch_size: int | None = None, order: Order | None = None, divided_by_host: bool = False
    ) -> LossRecord:
        """Read a loss; see `LossRecorder.read`."""

    def clear(self) -> None:
        """Forget the forward pass, whose tensors the record keeps alive."""
        of_losses: tuple[Any, ...] = (
            self.terms,
            self.before,
            self.choices,
            self.numbers,
            self.weighted,
            self.log_softmax,
        )
        for record in (*of_losses, self.selected_data, *self.noted.values()):
            record.clear()

    def node_of(self, value: Tensor) -> Any:
        """The node that computed a value, before identities of DistributedDataParallel and of backward hooks."""
        node, output = value.grad_fn, value.output_nr
        while node is not None and node not in self.terms and node.name() in _IDENTITIES:
            node, output = node.next_functions[output - len(output_shapes(node))]
        return node

    def _note(self, function: Any, value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call by its first result, or by the tensor that it changed."""
        notes = NOTED[function] if NOTED[function] == {"moved"} else notes_of(function, args, kwargs)
        if value.grad_fn is None and notes & {"select", "pack"}:
            self.selected_data.append(value)
        for note in notes if value.grad_fn is not None else ():
            self.noted[note].add(value.grad_fn)

    def _known(self, value: Any) -> tuple[Term, ...] | None:
        if isinstance(value, _Former):
            return value.terms
        return self.terms.get(self.node_of(value)) if isinstance(value, Tensor) else None

    def _all_terms(self, value: Any) -> tuple[Term, ...]:
        """The terms of a recorded value, the value itself as a term, or none for a constant."""
        has_graph = isinstance(value, Tensor) and value.requires_grad
        return self._known(value) or ((Term(value),) if has_graph else ())

    def _put(self, value: Tensor, terms: tuple[Term, ...], step: Step | None = None) -> None:
        self.terms[value.grad_fn] = terms if step is None else tuple(term.then(step) for term in terms)

    def _put_loss(self, function: Callable[..., Tensor], value: Tensor, *args: Any, **kwargs: Any) -> None:
        call = read_call(function, args, kwargs)
        if call is not None:
            self._put(value, (Term(value, call),))

    def _put_reduction(self, kind: str, value: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> None:
        dims = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
        keepdim = bool(kwargs.get("keepdim", args[1] if len(args) > 1 else False))
        if isinstance(dims, int):
            dims = (dims,)
        # Layers such as normalisations keep the dimension; their large inputs are not worth keeping.
        start = (Term(value),) if keepdim and input.dim() > 1 else self._all_terms(input)
        self._put(
            value, self._known(input) or start, Step(kind, dims or None, tuple(input.shape), keepdim, _edge(input))
        )

    def _put_product(self, kind: str, value: Tensor, one: Any, other: Any, **kwargs: Any) -> None:
        if self._known(one) is None and kind == "mul":
            one, other = other, one
        terms = self._known(one)
        if terms is None:
            self._note_factor(kind, value, one, other)
            return
        if self._known(other) is not None or value.shape != one.shape or kwargs.get("rounding_mode"):
            return
        if not isinstance(other, Tensor) or (other.numel() == 1 and not other.requires_grad):
            self.before[value.grad_fn] = terms
            self._put(value, terms, Step(kind, other.detach() if isinstance(other, Tensor) else other))
        elif not other.requires_grad:
            self._put(value, terms, Step("weigh"))
        elif value.numel() == 1 or (value.numel() == other.numel() and all(term.is_stacked for term in terms)):
            self._put(value, terms, Step("scale", other, edge=_factor(value, other)))

    def _note_factor(self, kind: str, value: Tensor, one: Any, other: Any) -> None:
        """Note the constant factor of values that are not reduced yet."""
        if kind == "mul" and not (isinstance(one, Tensor) and one.requires_grad):
            one, other = other, one
        if isinstance(other, Tensor) and other.requires_grad:
            return
        if isinstance(other, Tensor) and other.numel() > 1:
            if not (isinstance(one, Tensor) and one.grad_fn in self.log_softmax):  # probabilities as targets
                self.weighted.add(value.grad_fn)
        else:
            self.numbers[value.grad_fn] = other if kind == "mul" else 1 / other if other else math.inf

    def _put_mask(self, value: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> None:
        self.weighted.add(value.grad_fn)
        if isinstance(input, Tensor) and self._known(input) is not None and value.shape == input.shape:
            self._put(value, self.terms[self.node_of(input)], Step("weigh"))

    def _put_sum(
        self, signs: tuple[int, int], value: Tensor, one: Any, other: Any, *, alpha: float = 1, **_: Any
    ) -> None:
        if self._known(one) is None and self._known(other) is None:
            return
        if isinstance(one, _Former) and one.terms is None and one.requires_grad:
            return
        terms: tuple[Term, ...] = ()
        for part, factor in ((one, signs[0]), (other, signs[1] * alpha)):
            if isinstance(part, (Tensor, _Former)) and part.requires_grad and part.shape != value.shape:
                return
            of_part = self._all_terms(part)
            terms += of_part if factor == 1 else tuple(term.then(Step("mul", factor)) for term in of_part)
        self._put(value, terms)

    def _put_same(self, value: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> None:
        terms = self._known(input)
        if terms is not None and (value.shape == input.shape or value.numel() == input.numel() == 1):
            self._put(value, terms)
            if (node := self.node_of(input)) in self.before:
                self.before[value.grad_fn] = self.before[node]

    def _put_function(self, value: Tensor, input: Any, *args: Any, **kwargs: Any) -> None:
        terms = self._known(input)
        if terms is not None and value.numel() == 1 and input.numel() == 1:
            self._put(value, terms, Step("map", "function"))

    def _put_joined(self, value: Tensor, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> None:
        index = choices.at(dim % max(value.dim(), 1), slice(0, len(tensors[0])))
        self.choices[value.grad_fn] = (tuple(value.shape), index)
        self._put_stack(value, tensors)

    def _put_stack(self, value: Tensor, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        if value.numel() == len(tensors) and any(self._known(one) for one in tensors):
            self._put(value, tuple(t for one in tensors for t in self._all_terms(one)), Step("stack", len(tensors)))

    def _put_log_softmax(self, value: Tensor, input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> None:
        if dim is not None and dim % max(input.dim(), 1) == 1:
            self.log_softmax.add(value.grad_fn)

    def _put_negative(self, value: Tensor, input: Tensor) -> None:
        self._put_product("mul", value, input, -1)

    def _put_lookup(self, function: Callable[..., Tensor], value: Tensor, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        self.paddings.setdefault(given["weight"], set()).add(given.get("padding_idx"))

    def _put_choice(
        self, index_of: Callable[..., Any], value: Tensor, input: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if input.dim():
            self.choices[value.grad_fn] = (tuple(input.shape), index_of(value, input, *args, **kwargs))
            self._put_same(value, input)

    _handlers: ClassVar[dict[Any, tuple[Any, tuple[Any, ...]]]] = {
        **_losses(_put_loss),
        **_each("mean nanmean", _put_reduction, "mean"),
        **_each("sum nansum", _put_reduction, "sum"),
        **_each("mul mul_ multiply", _put_product, "mul"),
        **_each("div div_ divide true_divide", _put_product, "div"),
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
        **_each("__getitem__ masked_select", _put_choice, choices.getitem),
        **_each("select unbind __iter__ index_select", _put_choice, choices.select),
        **_each("narrow", _put_choice, choices.narrow),
        **_each("split chunk tensor_split", _put_choice, choices.split),
        **_each("topk", _put_choice, choices.topk),
        **_each("flip", _put_choice, choices.flip),
        **_each("roll", _put_choice, choices.roll),
        **_each("sort cumsum var std logsumexp amax amin max min prod median norm", _put_choice, choices.over),
        **_each("masked_fill where", _put_mask),
        F.embedding: (_put_lookup, (F.embedding,)),
        F.embedding_bag: (_put_lookup, (F.embedding_bag,)),
    }
