"""The tape of a forward pass: the operations that a loss may be made of, in the order of their calls.

Nothing is concluded while the model runs. `LossReader` plays the tape for a loss whose `signature` is new. Only tensors
whose values a term of a loss may need stay in memory; of all others the tape keeps the place in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, NamedTuple, final

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_bayes.curvature.layer_graph import LAYER
from lightning_bayes.curvature.loss_terms import Value
from lightning_bayes.curvature.operations import (
    BY_INDEX,
    BY_NUMBER,
    DATA,
    IN_PLACE,
    LOOK_UPS,
    MAKE_TERMS,
    OF_DATA,
    OF_TERMS,
    OPERATIONS,
)
from lightning_bayes.likelihood.loss_functions import LOSS_FUNCTIONS, signature_of
from lightning_bayes.private_torch import EagerMode

_BY_VALUE: Final = "depends on values"


class Operation(NamedTuple):
    """One call, with a `Value` in place of each tensor with gradients; a loss function keeps its arguments."""

    function: Callable[..., Any]
    value: Value  # the first result
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def signature(self) -> Hashable:
        """The shapes and numbers that its reading depends on; None if the reading depends on the values of tensors."""
        given = [_described(x, self.function) for x in (*self.args, *self.kwargs.values())]
        if self.function in (F.cross_entropy, F.nll_loss):  # ignored targets have to be counted
            bound = signature_of(self.function).bind(*self.args, **self.kwargs).arguments
            is_index = not bound["target"].is_floating_point()
            if is_index and bool((bound["target"] == bound.get("ignore_index", -100)).any()):
                return None
        return None if _BY_VALUE in given else (self.function, self.value.shape, tuple(given), tuple(self.kwargs))


@final
class Tape(EagerMode):
    """Notes the operations inside the context, which contains the forward pass.

    Attributes:
        observe: Gets the loss before each ``loss.backward()``, for callers that do not pass it explicitly.
        paddings: The padding_idx of the look-ups in each table.
        data_storages: The storages of tensors whose ``.data`` was read.
    """

    observe: Callable[[Tensor], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.paddings: dict[Tensor, set[int | None]] = {}
        self.data_storages: set[int] = set()
        self._with_terms: set[Any] = set()  # nodes of values that may have terms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and self.observe is not None:
            self.observe(args[0])
        if func not in OPERATIONS:
            result = func(*args, **kwargs)
            if func == DATA:  # each look-up of the descriptor makes another object
                self.data_storages.add(result.untyped_storage().data_ptr())
            return result
        if func in IN_PLACE:
            before = Value.of(args[0])
        result = func(*args, **kwargs)
        if func is Tensor.__iter__:
            result = list(result)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        first = args[0] if func is Tensor.__setitem__ else first
        if isinstance(first, Tensor) and (first.grad_fn is not None or func in OF_DATA):
            self._note(func, first, (before, *args[1:]) if func in IN_PLACE else args, kwargs)
        return iter(result) if func is Tensor.__iter__ else result

    def clear(self) -> None:
        """Forget the pass, whose graph the tape keeps alive, and what observes it."""
        self.observe = None
        self.operations.clear()
        self._with_terms.clear()

    def signature(self, loss: Tensor, layers: Mapping[Any, int]) -> Hashable:
        """The graph of a loss down to `layers`, numbers by node; None if its reading depends on the values of tensors."""
        if loss.grad_fn is None:  # which torch refuses in backward
            return None
        made: dict[Any, list[Operation]] = {}
        for each in self.operations:
            made.setdefault(each.value.grad_fn, []).append(each)
        numbers, stack, found = {loss.grad_fn: 0}, [loss.grad_fn], list[Hashable]()
        while stack:
            node: Any = stack.pop()
            if LAYER in node.metadata:
                found.append(("layer", layers.get(node)))
                continue
            operations = [each.signature() for each in made.get(node, ())]
            if None in operations:
                return None
            children = [child for child, _ in node.next_functions if child is not None]
            stack += [child for child in dict.fromkeys(children) if child not in numbers]
            edges = [(child and numbers.setdefault(child, len(numbers)), index) for child, index in node.next_functions]
            found.append((node.name(), tuple(operations), tuple(edges)))
        return tuple(found)

    def _note(self, func: Any, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [x for arg in (*args, *kwargs.values()) for x in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        of_terms = any(isinstance(x, (Tensor, Value)) and self._has_terms(x.grad_fn) for x in given)
        if func in OF_TERMS and not of_terms:
            return
        is_kept = of_terms or func in MAKE_TERMS
        value = Value.of(first, is_kept)
        if is_kept:
            self._with_terms.add(value.grad_fn)
        if func in LOOK_UPS:
            bound = signature_of(func).bind(*args, **kwargs).arguments
            self.paddings.setdefault(bound["weight"], set()).add(bound.get("padding_idx"))
        if func not in LOSS_FUNCTIONS:
            # Layers such as normalisations keep the reduced dimension; their large inputs are not worth keeping.
            is_kept = of_terms or (is_kept and not kwargs.get("keepdim", len(args) > 2 and args[2]))
            args, kwargs = _noted(args, is_kept), {name: _noted(x, is_kept) for name, x in kwargs.items()}
        self.operations.append(Operation(func, value, args, kwargs))

    def _has_terms(self, node: Any) -> bool:
        """Whether a node, or the one before Functions that may have returned its value, may have terms."""
        is_function = isinstance(node, BackwardCFunction) and node not in self._with_terms
        return node in self._with_terms or (is_function and any(self._has_terms(c) for c, _ in node.next_functions))


def _noted(x: Any, is_kept: bool) -> Any:
    """An argument for the tape."""
    if isinstance(x, (list, tuple)):
        items = [_noted(each, is_kept) for each in x]
        return items if isinstance(x, list) else tuple(items)
    return Value.of(x, is_kept) if isinstance(x, Tensor) and x.requires_grad else x


def _described(x: Any, function: Any) -> Hashable:
    """What a reading depends on of an argument."""
    if isinstance(x, Value):
        return x.shape
    if isinstance(x, Tensor):
        is_read = function in BY_INDEX or (function in BY_NUMBER and x.numel() == 1)
        return _BY_VALUE if is_read else ("data", tuple(x.shape), x.dtype, x.requires_grad)
    if isinstance(x, Iterable) and not isinstance(x, str):
        items = tuple(_described(each, function) for each in x)
        return _BY_VALUE if _BY_VALUE in items else items
    return x if isinstance(x, Hashable) else repr(x)
