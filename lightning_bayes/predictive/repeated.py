"""Calls that are repeated for one batch: what a user's network changes in its inputs, it changes once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from lightning_bayes.private_torch import tree_flatten, tree_leaves, tree_unflatten

_Value = TypeVar("_Value")


@final
class Repeatable:
    """A call whose repetitions find the arguments as the first one did; the first one changes them, as a plain call does."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._function, self._arguments = function, (args, kwargs)
        self._kept: Any = copied(self._arguments)  # until the first call has shown whether it changes them
        self._has_run = False

    def __call__(self) -> Any:
        """Call the function."""
        args, kwargs = self._arguments if self._kept is None or not self._has_run else copied(self._kept)
        result = self._function(*args, **kwargs)
        if not self._has_run:
            self._has_run = True
            self._kept = None if _are_equal(self._arguments, self._kept) else self._kept
        return result

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call has these very arguments."""
        own, other = tree_leaves(self._arguments), tree_leaves((args, kwargs))
        return len(own) == len(other) and all(one is another for one, another in zip(own, other, strict=True))


def copied(values: _Value) -> _Value:
    """The same tuples, lists and dictionaries with copies of their tensors."""
    leaves, structure = tree_flatten(values)
    result: _Value = tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
    return result


def _are_equal(values: Any, others: Any) -> bool:
    leaves, other_leaves = tree_leaves(values), tree_leaves(others)
    pairs = zip(leaves, other_leaves, strict=False)
    return len(leaves) == len(other_leaves) and all(_is_equal(one, other) for one, other in pairs)


def _is_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other
    try:
        return torch.equal(one, other)
    except (RuntimeError, NotImplementedError):  # sparse tensors and others: not known to be equal
        return False
