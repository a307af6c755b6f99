"""The outputs of measured layers in an autograd graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lightning_bayes.private_torch import output_shapes

_KEY = "measured_module"  # in a node's metadata
_VIEWS = (
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Clone",
    "ToCopy",
    "BackwardHookFunction",
)


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


def is_layer(node: Any) -> bool:
    """Whether `node` is the output of a measured layer. A module that returns the loss has hooks, too, but is no layer."""
    is_number = is_measured(node) and math.prod(output_shapes(node)[0]) == 1
    return is_measured(node) and not (is_number and node.name().rpartition("Backward")[0] in _VIEWS)


def nodes_behind(roots: list[Any], *, to_layers: bool = False) -> Iterator[Any]:
    """Yield every node that `roots` depend on, including the roots, each once; `to_layers` ends at the outputs of layers."""
    stack, seen = list(roots), set(roots)
    while stack:
        node = stack.pop()
        yield node
        if to_layers and is_layer(node):
            continue
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
