"""Recipes: how values follow from the outputs and the batch of a step, as the functions were called.

A recipe is plain data, so that checkpoints store it. Its nodes are

    ("output", i)    ("batch", i)    ("weight", name)    ("tensor", values)    ("call", function, arguments, options, item)

and Python's numbers, slices and lists. Only the functions of `FUNCTIONS` are recorded. They act on each example alone, so a
recipe applies to any number of examples. A value that another function computed has no recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

Recipe: TypeAlias = Any
_LARGEST_CONSTANT = 64  # elements of a tensor that a recipe holds
_NAMES = """
    __getitem__ select narrow unbind split chunk tensor_split squeeze unsqueeze flatten view view_as reshape expand expand_as
    broadcast_tensors broadcast_to transpose swapaxes permute movedim cat stack hstack
    add __radd__ sub __rsub__ rsub mul __rmul__ div __rdiv__ true_divide neg reciprocal pow __rpow__ square sqrt rsqrt abs
    exp log log1p log2 expm1 exp2 sigmoid logit tanh relu softplus elu clamp clamp_min clamp_max maximum minimum where
    softmax log_softmax logsigmoid float double half bfloat16 to type_as clone contiguous detach
    ones_like zeros_like full_like round floor ceil trunc long int
    add_ sub_ mul_ div_ neg_ exp_ sqrt_ square_ clamp_ clamp_min_ abs_ sigmoid_ tanh_ squeeze_ unsqueeze_
"""
_REDUCTIONS = ("sum", "mean", "logsumexp", "amax", "amin")  # recorded where they keep the examples
_SHAPING = ("view", "reshape", "expand", "broadcast_to")  # their first size may be the number of examples

_CONSTANT = ("ones_like", "zeros_like", "full_like")
_EXPANDING = ("expand", "expand_as", "broadcast_to")


def _functions(names: str) -> dict[str, Callable[..., Any]]:
    owners = {"Tensor": Tensor, "torch": torch, "F": F}
    return {f"{o}.{n}": getattr(owner, n) for o, owner in owners.items() for n in names.split() if hasattr(owner, n)}


_transposed: Callable[..., Any] = Tensor.T.__get__  # type: ignore[attr-defined]
FUNCTIONS: Final = {**_functions(_NAMES + " ".join(_REDUCTIONS)), "Tensor.T": _transposed}
_NAME_OF: Final = {function: name for name, function in FUNCTIONS.items()}


class _NoRecipeError(Exception):
    """A value cannot be written into a recipe."""


@final
class RecipeTape(TorchFunctionMode):
    """Records how values follow from outputs, batch and weights; calls `watched` before a function."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        batch: Sequence[Tensor],
        watched: Mapping[Any, Callable[..., None]] | None = None,
    ) -> None:
        super().__init__()
        self._watched = watched or {}
        self._known: Any = WeakIdKeyDictionary()
        self._num_examples = len(batch[0]) if batch and batch[0].dim() else 0
        for name, value in weights.items():
            self._known[value] = ("weight", name)
        self._note("batch", batch)

    def note_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Take these tensors as the outputs from now on."""
        self._note("output", outputs)

    def recipe(self, value: Any) -> Recipe | None:
        """The recipe of a tensor or number; None if there is none."""
        try:
            return self._written(value)
        except _NoRecipeError:
            return None

    def _note(self, kind: str, values: Sequence[Tensor]) -> None:
        for index, value in enumerate(values):
            self._known[value] = (kind, index)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__iter__:  # such as mean, variance = outputs.T
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        if func in self._watched:
            self._watched[func](func, *args, **(kwargs or {}))
        node = self._call(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        several = isinstance(result, (tuple, list))
        for item, value in enumerate(result) if several else ((None, result),):
            if isinstance(value, Tensor):
                if node is None:
                    self._known.pop(value, None)
                else:
                    self._known[value] = (*node, item)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Recipe | None:
        """The recipe of a call without its item; None for functions and arguments that cannot be recorded."""
        name = _NAME_OF.get(func)
        if name is None or not args or not _keeps_examples(name, args, kwargs):
            return None
        first = args[0] if isinstance(args[0], (tuple, list)) else args
        if not any(isinstance(value, Tensor) and value in self._known for value in (*args, *first)):
            return None
        kind = name.rpartition(".")[2]
        if kind in _CONSTANT and not self._has_outputs(args[0]):  # its shape follows the batch, its value does not
            return None
        if kind in _EXPANDING and args[0].numel() == 1:  # which broadcasting does as well
            args, name = args[:1], "Tensor.clone"
        elif kind in _SHAPING:
            args = self._with_rows(args)
        try:
            written = [self._written(value) for value in args]
            return "call", name, written, {key: self._written(value) for key, value in kwargs.items()}
        except _NoRecipeError:
            return None

    def _has_outputs(self, value: Any) -> bool:
        return isinstance(value, Tensor) and "output" in leaves_of(self._known.get(value))

    def _with_rows(self, args: Any) -> Any:
        """Arguments with -1 for the number of examples, as the first size."""
        sizes = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else list(args[1:])
        if sizes and sizes[0] == self._num_examples and -1 not in sizes[1:]:
            sizes[0] = -1
        return (args[0], *sizes)

    def _written(self, value: Any) -> Recipe:
        if isinstance(value, Tensor):
            return self._known[value] if value in self._known else _constant(value, self._num_examples)
        if isinstance(value, slice):
            return "slice", [value.start, value.stop, value.step]
        if isinstance(value, torch.dtype):
            return "dtype", str(value).rpartition(".")[2]
        if isinstance(value, torch.device):
            return ("device",)
        if value is Ellipsis:
            return ("ellipsis",)
        if isinstance(value, (tuple, list)):
            return [self._written(each) for each in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise _NoRecipeError


def _keeps_examples(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function treats each example alone: a reduction must name dimensions, and not the first."""
    if name.rpartition(".")[2] not in _REDUCTIONS:
        return True
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dims is None or isinstance(dims, bool):
        return False
    return all(d % args[0].dim() for d in ((dims,) if isinstance(dims, int) else dims))


def _constant(value: Tensor, num_examples: int) -> Recipe:
    """A constant tensor as plain data; `_NoRecipeError` if it is large, or may hold one value an example."""
    if value.requires_grad or value.numel() == 0 or value.layout != torch.strided:
        raise _NoRecipeError
    first = value.detach().flatten()[0]
    if bool((value == first).all()):
        return "tensor", first.item()
    if value.numel() > _LARGEST_CONSTANT or (value.dim() and len(value) == num_examples):
        raise _NoRecipeError
    return "tensor", value.tolist()


def cook(
    recipe: Recipe, outputs: Sequence[Tensor], batch: Sequence[Tensor] = (), weights: Mapping[str, Tensor] | None = None
) -> Any:
    """The value of a recipe, a tensor or a number, for outputs with any number of examples."""
    like = outputs[0] if outputs else next(iter(batch))

    def call(name: str, args: list[Recipe], options: dict[str, Recipe], item: int | None) -> Any:
        values = [tuple(a) if isinstance(a, list) and name.endswith("__getitem__") else a for a in map(value_of, args)]
        result = FUNCTIONS[name](*values, **{key: value_of(option) for key, option in options.items()})
        return result if item is None else result[item]

    kinds: dict[str, Callable[..., Any]] = {
        "call": call,
        "output": lambda index: outputs[index],
        "batch": lambda index: batch[index],
        "weight": lambda name: (weights or {})[name],
        "tensor": lambda values: torch.tensor(values, device=like.device),
        "device": lambda: like.device,
        "slice": lambda bounds: slice(*bounds),
        "dtype": lambda name: getattr(torch, name),
        "ellipsis": lambda: Ellipsis,
    }

    def value_of(node: Recipe) -> Any:
        if isinstance(node, list):
            return [value_of(each) for each in node]
        return kinds[node[0]](*node[1:]) if isinstance(node, tuple) else node

    return value_of(recipe)


def leaves_of(recipe: Recipe) -> set[str]:
    """The kinds of tensors that a recipe starts from: ``"output"``, ``"batch"``, ``"weight"``."""
    if isinstance(recipe, list):
        return set().union(*map(leaves_of, recipe))
    if not isinstance(recipe, tuple):
        return set()
    if recipe[0] == "call":
        return leaves_of(recipe[2]) | leaves_of(list(recipe[3].values()))
    return {recipe[0]} & {"output", "batch", "weight"}
