"""Calls that are repeated for one batch: what a user's network changes in its inputs and buffers, it changes once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.parameters import buffers_kept, changeable_buffers
from lightning_bayes.private_torch import tree_flatten, tree_leaves, tree_unflatten

_Value = TypeVar("_Value")


@final
class Repeatable:
    """A call whose repetitions find the arguments as the first one did; the first one changes them, as a plain call does.

    Buffers that a forward changes, such as those of observers and counters, are changed by the first call alone, unless
    `keeps_buffers` is False.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._function, self._arguments = function, (args, kwargs)
        self._kept: Any = copied(self._arguments)  # until the first call has shown whether it changes them
        self._has_run = self._changes_buffers = False
        self.keeps_buffers = True
        owner = getattr(function, "__self__", function)
        self._model = owner if isinstance(owner, nn.Module) else nn.Module()

    def __call__(self) -> Any:
        """Call the function."""
        if not self._has_run:
            return self._first()
        args, kwargs = self._arguments if self._kept is None else copied(self._kept)
        with buffers_kept(self._model) if self._changes_buffers and self.keeps_buffers else nullcontext():
            return self._function(*args, **kwargs)

    def _first(self) -> Any:
        args, kwargs = self._arguments
        buffers = [
            (*owned, owned[-1].clone()) for owned in changeable_buffers(self._model)
        ]  # inference counts no versions
        result = self._function(*args, **kwargs)
        self._changes_buffers = any(getattr(m, name) is not b or not torch.equal(b, old) for m, name, b, old in buffers)
        self._kept = None if _are_equal(self._arguments, self._kept) else self._kept
        self._has_run = True
        return result

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call has these very arguments."""
        own, other = tree_leaves(self._arguments), tree_leaves((args, kwargs))
        return len(own) == len(other) and all(one is another for one, another in zip(own, other, strict=True))

    def equals(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether arguments have the values that the first call found."""
        return _are_equal((args, kwargs), self._arguments if self._kept is None else self._kept)


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
