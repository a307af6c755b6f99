"""Paths of leaves in nested outputs and batches: tuples, lists, dictionaries, named tuples and `ModelOutput`.

The path of a tensor alone is ``()``; ``("logits",)`` is an entry of a dictionary, ``(0,)`` the first of a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a nested value with their paths, in order; None is no leaf."""
    children = _children(value)
    if children is None and value is not None:
        yield path, value
    for key, child in children or ():
        yield from leaves(child, (*path, key))


def entries(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """A nested value itself and everything in it, with paths, in order; None is no entry."""
    if value is not None:
        yield path, value
    for key, child in _children(value) or ():
        yield from entries(child, (*path, key))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """The keys and values of a container; None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def leaf_at(value: Any, path: Path) -> Any:
    """The value at a path; raises `LookupError` or `AttributeError` if there is none."""
    for key in path:
        is_entry = isinstance(value, (Mapping, tuple, list))
        value = value[key] if is_entry else getattr(value, str(key))
    return value


def with_leaf(value: Any, path: Path, leaf: Any) -> Any:
    """The same structure with another value at a path; `value` itself is unchanged."""
    if not path:
        return leaf
    key, rest = path[0], path[1:]
    inner = with_leaf(leaf_at(value, (key,)), rest, leaf)
    if isinstance(value, Mapping):
        return type(value)({**value, key: inner})  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        items = [inner if index == key else item for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return replace(value, **{str(key): inner})
