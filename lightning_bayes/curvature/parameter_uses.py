"""The outputs of measured layers in an autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_KEY = "measured_module"  # in a node's metadata


def mark_measured(node: Any, unit: Any) -> None:
    """Mark a node as the output of a call of `unit`."""
    node.metadata[_KEY] = unit


def measured_module(node: Any) -> Any:
    """The measured module whose output a node is; None for any other node."""
    return node.metadata.get(_KEY)


def enters_measured_layer(node: Any) -> bool:
    """Whether `node` depends on the output of a measured layer."""
    return any(map(is_measured, nodes_behind([node])))


def is_measured(node: Any) -> bool:
    """Whether `node` is the output of a measured layer."""
    return _KEY in node.metadata


def nodes_behind(roots: list[Any]) -> Iterator[Any]:
    """Yield every node that `roots` depend on, including the roots, each once."""
    stack, seen = list(roots), set(roots)
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
