"""Paths of leaves in nested outputs and batches: tuples, lists, dictionaries, named tuples and `ModelOutput`.

The path of a tensor alone is ``()``; ``("logits",)`` is an entry of a dictionary, ``(0,)`` the first of a tuple.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a nested value with their paths, in order; None is no leaf."""
    children = children_of(value)
    if children is None and value is not None:
        yield path, value
    for key, child in (children or {}).items():
        yield from leaves(child, (*path, key))


def entries(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """A nested value itself and everything in it, with paths, in order; None is no entry."""
    if value is not None:
        yield path, value
    for key, child in (children_of(value) or {}).items():
        yield from entries(child, (*path, key))


def children_of(value: Any) -> dict[Any, Any] | None:
    """The entries of a container; None for a leaf."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def rebuilt(value: Any, children: Mapping[Any, Any]) -> Any:
    """A container like `value` with other entries."""
    if isinstance(value, (tuple, list)):
        items = list(children.values())
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy.copy(value)
    for key, child in children.items():
        if isinstance(value, Mapping):
            result[key] = child
        else:
            object.__setattr__(result, key, child)  # frozen dataclasses, too
    return result


def mapped(function: Callable[..., Any], *values: Any) -> Any:
    """The structure of the first value with leaves ``function(leaf, …)``; where structures differ, values are leaves."""
    children = [children_of(value) for value in values]
    first = children[0]
    if first is None or any(other is None or other.keys() != first.keys() for other in children):
        return function(*values)
    inner = {key: mapped(function, *(each[key] for each in children if each is not None)) for key in first}
    return rebuilt(values[0], inner)


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
    return rebuilt(value, {**(children_of(value) or {}), key: with_leaf(leaf_at(value, (key,)), rest, leaf)})
