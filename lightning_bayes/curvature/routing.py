"""Layer calls on selected rows, such as experts that receive the rows of a batch from a gate.

The rows of an example differ from batch to batch. If they match a layout, it is a coincidence.
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

_SCATTERS = ("IndexPut", "IndexAdd", "IndexCopy", "Scatter", "MaskedScatter")


def routed_calls(loss: Tensor, outputs: Sequence[LayerOutput]) -> set[int]:
    """Indices of the calls on selected rows, and of the calls whose output rows are scattered to selected positions."""
    index_of = {node: index for index, out in enumerate(outputs) for node, _ in out.edges}
    routed = {index for node, index in index_of.items() if _has_selected_rows(node, outputs[index].rows)}
    for node in nodes_behind([loss.grad_fn]):
        if not graph.name_of(node).startswith(_SCATTERS):
            continue
        for edge in graph.edges_of(node):
            if edge is not None:
                num_rows = graph.shape_of(edge)[:1]
                reached = [index_of[layer] for layer in _up_to_layers(edge[0]) if layer in index_of]
                routed.update(index for index in reached if (outputs[index].rows,) == num_rows)
    return routed


def _has_selected_rows(layer: Any, rows: int) -> bool:
    ancestors = [node for child, _ in layer.next_functions if child is not None for node in _up_to_layers(child)]
    packed = [node for node in ancestors if graph.name_of(node).startswith("PackPaddedSequence")]
    if packed:
        # Packing sorts the examples, and unpacking restores their order, unless the layer uses the packed rows directly.
        return any(graph.shape_of((node, 0))[:1] == (rows,) for node in packed)
    return any(
        _selects(node) and graph.shape_of((node, 0))[:1] == (rows,) for node in ancestors if not is_measured(node)
    )


def _selects(node: Any) -> bool:
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
    """Yield the node and the nodes that it depends on, up to and including the first outputs of measured layers."""
    stack, seen = [node], {node}
    while stack:
        current = stack.pop()
        yield current
        if not is_measured(current):
            children = [child for child, _ in current.next_functions if child is not None and child not in seen]
            seen.update(children)
            stack += children
