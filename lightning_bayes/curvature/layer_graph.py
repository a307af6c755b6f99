"""The outputs of measured layers in an autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_bayes.private_torch import UNREPEATABLE

LAYER = "measured_module"  # key of a node's metadata: the measured module whose output it is


def comes_after_layer(node: Any) -> bool:
    """Whether `node` depends on the output of a measured layer."""
    return any(LAYER in each.metadata for each in nodes_behind([node]))


def nodes_behind(roots: list[Any], *, to_layers: bool = False) -> Iterator[Any]:
    """Yield every node that `roots` depend on, including the roots, each once; `to_layers` ends at the outputs of layers."""
    stack = [root for root in roots if root is not None]  # a value without a graph depends on nothing
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        if to_layers and LAYER in node.metadata:
            continue
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def can_repeat_backward(loss: Tensor) -> bool:
    """Whether this process alone can run backward through the graph of a loss several times."""
    if loss.grad_fn is None:  # torch's own error follows in backward
        return False
    return not any(node.name().startswith(UNREPEATABLE) for node in nodes_behind([loss.grad_fn]))
