"""Layer calls on selected rows, such as experts that receive the rows of a batch from a gate.

The rows of an example differ from batch to batch. If they match a layout, it is a coincidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature import loss_graph as graph
from lightning_bayes.curvature.layouts import LayerOutput
from lightning_bayes.curvature.parameter_uses import nodes_behind
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
                reached = [index_of[layer] for layer in graph.in_order(edge[0], True) if layer in index_of]
                routed.update(index for index in reached if (outputs[index].rows,) == graph.shape_of(edge)[:1])
    return routed


def _has_selected_rows(layer: Any, rows: int) -> bool:
    sources = [child for child, _ in layer.next_functions if child is not None]
    ancestors = [node for source in sources for node in graph.in_order(source, True)]
    # Packing sorts the examples, and unpacking restores their order, unless the layer uses the packed rows directly.
    packed = [node for node in ancestors if graph.name_of(node).startswith("PackPaddedSequence")]
    selecting = packed or [node for node in ancestors if _selects(node)]
    return any(graph.shape_of((node, 0))[:1] == (rows,) for node in selecting)


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
