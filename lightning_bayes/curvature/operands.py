"""Parameters outside layers, such as position embeddings, class tokens, gates and scales of branches.

A module that holds parameters beside its children passes them to functions in its forward. Each such call is measured like
a call of a layer. So the children keep their own rules, and no forward runs again:

    y = x + p, y = x ⊙ p          c_i = Σ δ_i ⊙ ∂y/∂p, summed over the dimensions that p is broadcast to
    y = p.expand(n, …)            c_i = δ_i
    y = f(x, p), any other f      c_i = (∂f(x_i, p)/∂p)ᵀ δ_i by `torch.vmap`

What functions make of parameters and constants alone, such as a slice of a table, is an `Expression`; contributions to its
value are pulled back to the parameters. A module that runs under a checkpoint is repeated by `rules.whole_batch` instead. A
use that none of this covers fails the check of the pass, and its module is measured as a whole from then on
(`Plans.replan`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lightning_bayes.curvature.checkpointing import in_checkpoint
from lightning_bayes.curvature.engine import AbstractEngine
from lightning_bayes.curvature.expressions import Expression, Slot
from lightning_bayes.curvature.layer_calls import LayerCall, OnGradients
from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.curvature.operand_calls import BroadcastCall, Call, FunctionCall
from lightning_bayes.curvature.rules.registry import LayerRule


def _named(names: str) -> set[Any]:
    return {getattr(owner, name) for name in names.split() for owner in (torch, Tensor) if hasattr(owner, name)}


_SUMS, _PRODUCTS = _named("add __radd__"), _named("mul multiply __rmul__")
_EXPANSIONS = _named("expand expand_as broadcast_to repeat")
_LEADING_DIMS_ARE_ALIKE: Final = LayerRule(lambda layer, inputs, delta: {}, (), input_dims=1, takes_positions=True)


@final
class Operands(TorchFunctionMode):
    """Watches the functions that take parameters of some units.

    Args:
        units: The modules that hold the parameters.
        on_gradients: Gets the gradients of a call in backward.
        record: Records a call, and returns its result.
        sizes: By label, the numbers of rows that calls saw so far. A result in which no dimension without values of the
            parameters is a multiple of one, such as the losses of two tasks, is left to the loop over the examples.
        engine: Has the model, whose buffers are constants, and the workspace.
    """

    def __init__(
        self,
        units: Iterable[MeasuredModule],
        on_gradients: OnGradients,
        record: Callable[[LayerCall], Any],
        sizes: Mapping[str, set[int]],
        engine: AbstractEngine,
    ) -> None:
        super().__init__()
        self._owners = {p: unit for unit in units for p in unit.params.values() if p.requires_grad}
        self._made: dict[
            int, tuple[Tensor, Expression]
        ] = {}  # by id of a value, which is kept so that the id is its own
        self._constants = {
            buffer.untyped_storage().data_ptr() for buffer in engine.model.buffers() if not is_lazy(buffer)
        }
        self._workspace, self._on_gradients, self._record = engine.workspace, on_gradients, record
        self._sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [x for arg in (*args, *kwargs.values()) for x in (arg if type(arg) in {list, tuple} else (arg,))]
        tensors = [x for x in given if isinstance(x, Tensor)]
        # Nothing watches a segment under a checkpoint that runs again in backward.
        if torch.is_grad_enabled() and any(map(self._is_operand, tensors)) and not in_checkpoint():
            return self._watched(func, args, kwargs, tensors, result)
        return result

    def _is_operand(self, x: Tensor) -> bool:
        return id(x) in self._made or (isinstance(x, nn.Parameter) and x in self._owners)

    def _watched(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor], result: Any) -> Any:
        """Record a call that takes operands; returns its result, perhaps as a copy."""
        others = [x for x in tensors if not self._is_operand(x)]
        examples = [x for x in others if x.requires_grad or self._may_hold_examples(x)]
        slots = {id(x): Slot() for x in examples}
        if any(isinstance(x, nn.Parameter) for x in others) or len(slots) < len(examples):
            return result
        call = self._expression(function, args, kwargs, slots)
        if not examples and not (function in _EXPANSIONS and _makes_rows(function, args[0], result)):
            self._keep(call, result)
            return result
        owners = {self._owners[param] for param in call.params}
        is_new = isinstance(result, Tensor) and result.requires_grad and not any(result is x for x in tensors)
        if not is_new or len(owners) != 1:
            return result
        operand = self._broadcast(function, args, kwargs)
        if not self._holds_examples(result, None if operand is None else args[operand]):
            return result
        owner = owners.pop()
        rule = owner.rule if operand is None else _LEADING_DIMS_ARE_ALIKE
        found = self._call(replace(owner, rule=rule), call.params, examples, result)
        if operand is None:
            return self._record(FunctionCall(found, call, [*slots.values()]))
        saved = examples if function in _PRODUCTS else []
        return self._record(BroadcastCall(found, saved, call.args[operand], args[operand].shape))

    def _call(
        self, unit: MeasuredModule, params: Collection[nn.Parameter], examples: list[Tensor], result: Tensor
    ) -> Call:
        """A call that takes these parameters of a unit."""
        names = frozenset(name for name, p in unit.params.items() if p in params)
        return Call(replace(unit, only=names), examples, result, self._workspace, self._on_gradients)

    def _broadcast(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Which argument of a sum, a product or an expansion is the operand; None for other functions."""
        is_of_two = len(args) == 2 and function in _PRODUCTS | _SUMS
        if kwargs or not (is_of_two or function in _EXPANSIONS):
            return None
        return next(i for i, x in enumerate(args) if isinstance(x, Tensor) and self._is_operand(x))

    def _expression(self, function: Any, args: Any, kwargs: Any, slots: dict[int, Slot]) -> Expression:
        """A call with expressions and slots in place of the values that they made or stand for."""
        params = set[nn.Parameter]()
        parts = self._noted(tuple(args), slots, params), self._noted(kwargs, slots, params)
        return Expression(function, *parts, frozenset(params))

    def _noted(self, x: Any, slots: dict[int, Slot], params: set[nn.Parameter]) -> Any:
        if isinstance(x, dict):
            return {name: self._noted(each, slots, params) for name, each in x.items()}
        if type(x) in {list, tuple}:
            return type(x)(self._noted(each, slots, params) for each in x)
        if id(x) in self._made:
            params.update(self._made[id(x)][1].params)
            return self._made[id(x)][1]
        if isinstance(x, nn.Parameter):
            params.add(x)
        return slots.get(id(x), x)

    def _keep(self, call: Expression, result: Any) -> None:
        """Keep what a function made of operands alone."""
        several = isinstance(result, (list, tuple))
        for index, value in enumerate(result if several else [result]):
            if isinstance(value, Tensor) and value.requires_grad:
                self._made[id(value)] = value, call._replace(position=index if several else None)

    def _holds_examples(self, result: Tensor, operand: Tensor | None) -> bool:
        """Whether a dimension of a result, without values of a broadcast operand, is a multiple of some layer's rows."""
        own = [1] * result.dim() if operand is None else [1] * (result.dim() - operand.dim()) + [*operand.shape]
        shared = [size for size, of_operand in zip(result.shape, own, strict=True) if of_operand == 1]
        seen = set[int]().union(*self._sizes.values()) - {0}
        return any(not seen or any(size % n == 0 for n in seen) for size in shared)

    def _may_hold_examples(self, x: Tensor) -> bool:
        """Whether a tensor without gradients is neither a single number nor a buffer, or a view of one."""
        return x.numel() > 1 and x.untyped_storage().data_ptr() not in self._constants


def _makes_rows(function: Any, operand: Tensor, result: Tensor) -> bool:
    """Whether an expansion makes the rows of a batch from one."""
    rank = result.dim()
    before, after = (1,) * (rank - operand.dim()) + tuple(operand.shape), tuple(result.shape)
    return rank > 0 and before[0] == 1 < after[0] and (function is not Tensor.repeat or before[1:] == after[1:])
