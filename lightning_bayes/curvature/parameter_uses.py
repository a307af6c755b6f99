"""The parameters that a loss uses, and how often, read from its autograd graph.

An engine measures the calls of layers. A weight that is also used outside of them, as in
``F.linear(hidden, self.embed.weight)``, gets a gradient there that no rule squares example by example. Layers that the fused
engine measures run on detached weights, which enter the graph only behind their output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

_FUSED = "MeasuredOutputBackward"
_MEASURED = (_FUSED, "BackwardHookFunctionBackward")  # behind the layers of either engine


def count_uses(loss: Tensor) -> Counter[Tensor]:
    """How often each leaf tensor enters those parts of `loss` that come out of measured layers, not by the fused engine.

    Args:
        loss: Scalar with a graph. A term without any measured layer, such as a penalty on the weights, is left out.

    Returns:
        The count of each leaf that requires gradients.
    """
    uses: Counter[Tensor] = Counter()
    roots = [root for root in _summands(loss.grad_fn) if enters_measured_layer(root)]
    for node in nodes_behind(roots):
        if node.name().startswith(_FUSED):
            continue
        uses.update(leaf for child, _ in node.next_functions if (leaf := getattr(child, "variable", None)) is not None)
    return uses


def enters_measured_layer(node: Any) -> bool:
    """Whether `node` was computed from the output of a layer that an engine measures."""
    return any(map(is_measured, nodes_behind([node])))


def is_measured(node: Any) -> bool:
    """Whether `node` is the output of a layer that an engine measures."""
    return bool(node.name().startswith(_MEASURED))


def _summands(root: Any) -> list[Any]:
    """The nodes that a final sum of scalars adds."""
    if root is None:
        return []
    if not root.name().startswith(("AddBackward", "SubBackward", "MulBackward", "DivBackward")):
        return [root]
    return [part for child, _ in root.next_functions for part in _summands(child)]


def nodes_behind(roots: list[Any]) -> Iterator[Any]:
    """Yield every node that some were computed from, themselves included, once.

    Args:
        roots: Nodes of autograd's graph.

    Yields:
        The nodes.
    """
    stack, seen = list(roots), set(roots)
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
