"""`LossRecorder`: records the loss functions and the reductions of a forward pass as they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature import loss_choices as choices
from lightning_bayes.curvature.loss import LossRecord, only, record_of
from lightning_bayes.curvature.loss_functions import LOSS_FUNCTIONS, LossLink, read_call
from lightning_bayes.curvature.loss_terms import Reading, Shape, Step, Term
from lightning_bayes.private_torch import DDP_SINK, output_shapes


@dataclass
class _Path:
    """What lies between the layers and a value."""

    nodes: list[Any] = field(default_factory=list)
    depends: bool = False  # whether the value depends on examples


def _each(names: str, handler: Any, *first: Any) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    """The handler of the functions and methods of these names."""
    owners = [getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)]
    return {function: (handler, first) for function in owners}


def _losses(handler: Any) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    return {function: (handler, (function,)) for function in LOSS_FUNCTIONS}


class _Former(NamedTuple):
    """A tensor before an operation changed it in place."""

    terms: tuple[Term, ...] | None
    requires_grad: bool
    shape: Shape


_IN_PLACE = {Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_}


class LossRecorder(TorchFunctionMode):
    """Records the loss functions and reductions inside the context, which contains the forward pass.

    Args:
        is_layer: Whether an autograd node is the output of a layer, so that what depends on it depends on the examples.
            Without it, any value counts as one that depends on them, except for functions of parameters alone.
    """

    def __init__(self, is_layer: Callable[[Any], bool] | None = None) -> None:
        super().__init__()
        self._is_layer = is_layer
        self._terms: dict[Any, tuple[Term, ...]] = {}  # by autograd node
        self._before: dict[Any, tuple[Term, ...]] = {}  # the terms before a product with a number
        self._choices: dict[Any, tuple[Shape, Any]] = {}  # shapes, and the indices of what was selected from them
        self._log_softmax: set[Any] = set()  # nodes of log-probabilities of classes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._handlers:
            return func(*args, **kwargs)
        is_in_place = func in _IN_PLACE
        former = _Former(self._known(args[0]), args[0].requires_grad, args[0].shape) if is_in_place else None
        result = func(*args, **kwargs)
        if func is Tensor.__iter__:
            result = list(result)
        value = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(value, Tensor) and value.grad_fn is not None:
            handler, first = self._handlers[func]
            handler(self, *first, value, *(args if former is None else (former, *args[1:])), **kwargs)
        return iter(result) if func is Tensor.__iter__ else result

    def read(self, loss: Tensor, batch_size: int | None = None, divided_by_host: bool = False) -> LossRecord:
        """Read a loss. A loss that was not recorded gives an unknown reduction, never an error.

        Args:
            loss: The loss, with its graph, before backward.
            batch_size: Number of examples B; None reads the first dimension as the examples.
            divided_by_host: Whether the training loop divided the loss last, which is no part of the loss.

        Returns:
            The record of this loss.
        """
        node = _without_sink(loss)
        terms = (self._before.get(node) if divided_by_host else None) or self._terms.get(node)
        if terms is None:
            why = "is computed by a function that is not recorded"
            return LossRecord("unknown", why, link=only(self._links_of(self._path(node))))
        read = [(term, *self._read_term(term, batch_size)) for term in terms]
        return record_of([(term, reading, links) for term, reading, links, depends in read if depends], batch_size)

    def _read_term(self, term: Term, batch_size: int | None) -> tuple[Reading, set[LossLink], bool]:
        """How a term reduces its examples, its links, and whether it depends on examples."""
        path = self._path(_node_of(term.outputs))
        reading = term.read(batch_size)
        why = reading.why or self._why_unclear(path, batch_size)
        if any(self._path(_node_of(factor)).depends for factor in term.learned):
            why = why or "is multiplied by a factor that depends on the examples"
        links: set[LossLink] = {term.call.link} if term.call and term.call.link else self._links_of(path)
        return Reading("unknown" if why else reading.reduction, why, reading.factor), links, path.depends

    def _why_unclear(self, path: _Path, batch_size: int | None) -> str:
        """Why the examples of the values behind a path are not those of the batch; empty if they are."""
        for node in path.nodes:
            if any(term.read(batch_size).reduction in {"mean", "sum"} for term in self._terms.get(node, ())):
                return "is a function of values that are already reduced over the examples"
            if node in self._choices and choices.leaves_out(*self._choices[node], batch_size):
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

    def _links_of(self, path: _Path) -> set[LossLink]:
        """The links of the loss functions on a path, or of its log-probabilities."""
        calls = [term.call for node in path.nodes for term in self._terms.get(node, ()) if term.call is not None]
        links: set[LossLink] = {call.link for call in calls if call.link is not None}
        return links or ({"softmax"} if not self._log_softmax.isdisjoint(path.nodes) else set())

    # -- recording ----------------------------------------------------------------------------------------------------

    def _known(self, value: Any) -> tuple[Term, ...] | None:
        if isinstance(value, _Former):
            return value.terms
        return self._terms.get(value.grad_fn) if isinstance(value, Tensor) else None

    def _all_terms(self, value: Any) -> tuple[Term, ...]:
        """The terms of a recorded value, the value itself as a term, or none for a constant."""
        has_graph = isinstance(value, Tensor) and value.requires_grad
        return self._known(value) or ((Term(value),) if has_graph else ())

    def _put(self, value: Tensor, terms: tuple[Term, ...], step: Step | None = None) -> None:
        self._terms[value.grad_fn] = terms if step is None else tuple(term.then(step) for term in terms)

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
        self._put(value, self._known(input) or start, Step(kind, dims or None, tuple(input.shape), keepdim))

    def _put_product(self, kind: str, value: Tensor, one: Any, other: Any, **kwargs: Any) -> None:
        if self._known(one) is None and kind == "mul":
            one, other = other, one
        terms = self._known(one)
        if terms is None or self._known(other) is not None or value.shape != one.shape or kwargs.get("rounding_mode"):
            return
        if not isinstance(other, Tensor) or (other.numel() == 1 and not other.requires_grad):
            self._before[value.grad_fn] = terms
            self._put(value, terms, Step(kind, other.detach() if isinstance(other, Tensor) else other))
        elif not other.requires_grad:
            self._put(value, terms, Step("weigh"))
        elif value.numel() == 1:
            self._put(value, terms, Step("scale", other))

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
            if input.grad_fn in self._before:
                self._before[value.grad_fn] = self._before[input.grad_fn]

    def _put_function(self, value: Tensor, input: Any, *args: Any, **kwargs: Any) -> None:
        terms = self._known(input)
        if terms is not None and value.numel() == 1 and input.numel() == 1:
            self._put(value, terms, Step("map", "function"))

    def _put_stack(self, value: Tensor, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        if value.numel() == len(tensors) and any(self._known(one) for one in tensors):
            self._put(value, tuple(t for one in tensors for t in self._all_terms(one)), Step("stack", len(tensors)))

    def _put_log_softmax(self, value: Tensor, input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> None:
        if dim is not None and dim % max(input.dim(), 1) == 1:
            self._log_softmax.add(value.grad_fn)

    def _put_negative(self, value: Tensor, input: Tensor) -> None:
        self._put_product("mul", value, input, -1)

    def _put_choice(
        self, index_of: Callable[..., Any], value: Tensor, input: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        if input.dim():
            self._choices[value.grad_fn] = (tuple(input.shape), index_of(value, input, *args, **kwargs))
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
        **_each("stack hstack cat", _put_stack),
        **_each("log_softmax", _put_log_softmax),
        F.log_softmax: (_put_log_softmax, ()),
        **_each("__getitem__ masked_select", _put_choice, choices.getitem),
        **_each("select unbind __iter__ index_select", _put_choice, choices.select),
        **_each("narrow", _put_choice, choices.narrow),
        **_each("split chunk tensor_split", _put_choice, choices.split),
        **_each("topk", _put_choice, choices.topk),
    }


def _node_of(value: Tensor) -> Any:
    return value.grad_fn


def _without_sink(loss: Tensor) -> Any:
    """The node of a loss, before the identity that DistributedDataParallel applies to all outputs of a step."""
    node, output = loss.grad_fn, loss.output_nr
    if node is not None and node.name().removesuffix("Backward") == DDP_SINK:
        return node.next_functions[output - len(output_shapes(node))][0]
    return node
