"""Calls of layers on rows that a mask or numbers have chosen, such as experts, to which a gate routes the rows of a batch.

Which example a row belongs to differs from batch to batch, and rows that fit a layout do so by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.layouts import LayerOutput
from lightning_bayes.curvature.parameter_uses import is_measured, nodes_behind
from lightning_bayes.private_torch import saved_by

_PUTTING = ("IndexPut", "IndexAdd", "IndexCopy", "Scatter", "MaskedScatter")


def routed_calls(loss: Tensor, outputs: Sequence[LayerOutput]) -> set[int]:
    """The calls on rows that were chosen, or whose rows are put to chosen places.

    Args:
        loss: The loss.
        outputs: The calls.

    Returns:
        Their places among the calls.
    """
    places = {node: place for place, out in enumerate(outputs) for node, _ in out.edges}
    found = {place for node, place in places.items() if _takes_chosen_rows(node, outputs[place].rows)}
    for node in nodes_behind([loss.grad_fn]):
        if graph.name_of(node).startswith(_PUTTING):
            for edge in graph.edges_of(node):
                if edge is not None:
                    rows = graph.shape_of(edge)[:1]
                    reached = (places[one] for one in _up_to_layers(edge[0]) if one in places)
                    found |= {place for place in reached if (outputs[place].rows,) == rows}
    return found


def _takes_chosen_rows(node: Any, rows: int) -> bool:
    behind = [one for child, _ in node.next_functions if child is not None for one in _up_to_layers(child)]
    packed = [one for one in behind if graph.name_of(one).startswith("PackPaddedSequence")]
    if packed:  # which sorts the examples, and is undone unless its rows are taken as they are
        return any(graph.shape_of((one, 0))[:1] == (rows,) for one in packed)
    return any(_chooses(one) and graph.shape_of((one, 0))[:1] == (rows,) for one in behind if not is_measured(one))


def _chooses(node: Any) -> bool:
    name = graph.name_of(node)
    if name == "IndexSelect":
        return bool(saved_by(node, "dim") == 0)
    if name != "Index":
        return name == "MaskedSelect"
    index = saved_by(node, "indices")[0]
    if index is None:
        return False
    return index.dtype == torch.bool or not torch.equal(
        index.flatten(), torch.arange(index.numel(), device=index.device)
    )


def _up_to_layers(node: Any) -> Iterator[Any]:
    """The nodes that a node was computed from, up to the first outputs of measured layers, with these."""
    stack, seen = [node], {node}
    while stack:
        one = stack.pop()
        yield one
        if not is_measured(one):
            children = [child for child, _ in one.next_functions if child is not None and child not in seen]
            seen.update(children)
            stack += children
