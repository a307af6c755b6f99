"""How often a loss uses each parameter, read from its autograd graph.

An engine measures the calls of layers. If a weight is also used outside of its layer, as in
``F.linear(hidden, self.embed.weight)``, no rule squares that part of its gradient per example. Layers that the fused engine
measures run on detached weights, so only the identity on their output has an edge to the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

_FUSED = "MeasuredOutputBackward"
_MEASURED = (_FUSED, "BackwardHookFunctionBackward")  # outputs of measured layers, for either engine


def count_uses(loss: Tensor) -> Counter[Tensor]:
    """Uses of each leaf in `loss`, except for terms without measured layers and uses that the fused engine measures."""
    uses: Counter[Tensor] = Counter()
    roots = [root for root in _summands(loss.grad_fn) if enters_measured_layer(root)]
    for node in nodes_behind(roots):
        if node.name().startswith(_FUSED):
            continue
        uses.update(leaf for child, _ in node.next_functions if (leaf := getattr(child, "variable", None)) is not None)
    return uses


def enters_measured_layer(node: Any) -> bool:
    """Whether `node` depends on the output of a measured layer."""
    return any(map(is_measured, nodes_behind([node])))


def is_measured(node: Any) -> bool:
    """Whether `node` is the output of a measured layer."""
    return bool(node.name().startswith(_MEASURED))


def _summands(root: Any) -> list[Any]:
    """The summands of the loss: sums, differences and products with constants at the root are split."""
    if root is None:
        return []
    children = [child for child, _ in root.next_functions]
    is_scaled = root.name().startswith(("MulBackward", "DivBackward")) and None in children
    if not is_scaled and not root.name().startswith(("AddBackward", "SubBackward")):
        return [root]
    return [part for child in children for part in _summands(child)]


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
