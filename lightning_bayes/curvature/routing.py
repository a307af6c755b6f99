"""Calls that divide the batch: on rows that a gate selects, or on one example each.

The selected rows of an example differ from batch to batch. If they match a layout, it is a coincidence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.layouts import LayerOutput
from lightning_bayes.curvature.parameter_uses import is_measured, nodes_behind
from lightning_bayes.private_torch import output_shapes, saved_by

_SCATTERS = ("IndexPut", "IndexAdd", "IndexCopy", "Scatter", "MaskedScatter")


def routed_calls(loss: Tensor, outputs: Sequence[LayerOutput]) -> set[int]:
    """Indices of the calls on selected rows, and of the calls whose output rows are scattered to selected positions."""
    index_of = {node: index for index, out in enumerate(outputs) for node, _ in out.edges}
    routed = {index for index, out in enumerate(outputs) if _has_selected_rows(out)}
    for node in nodes_behind([loss.grad_fn]):
        if not node.name().startswith(_SCATTERS):
            continue
        for child, index in node.next_functions:
            if child is not None:
                rows = output_shapes(child)[index][:1]
                reached = [index_of[layer] for layer in nodes_behind([child], to_layers=True) if layer in index_of]
                routed.update(call for call in reached if (outputs[call].rows,) == rows)
    return routed


def _has_selected_rows(output: LayerOutput) -> bool:
    ancestors = [node for source in output.sources for node in nodes_behind([source], to_layers=True)]
    # Packing sorts the examples, and unpacking restores their order, unless the layer uses the packed rows directly.
    packed = [node for node in ancestors if node.name().startswith("PackPaddedSequence")]
    selecting = packed or [node for node in ancestors if _selects(node)]
    return any(output_shapes(node)[0][:1] == (output.rows,) for node in selecting)


def _selects(node: Any) -> bool:
    name = node.name()
    if name.startswith("IndexSelect"):
        return bool(saved_by(node, "dim") == 0)
    if not name.startswith("IndexBackward"):
        return bool(name.startswith("MaskedSelect"))
    index = saved_by(node, "indices")[0]
    return index is not None and not _is_in_order(index)


def _is_in_order(index: Tensor) -> bool:
    return index.dtype != torch.bool and torch.equal(index.flatten(), torch.arange(index.numel(), device=index.device))


def one_at_a_time(loss: Tensor, outputs: Sequence[LayerOutput]) -> str:
    """An error message if the examples seem to pass through the layers one by one and to be stacked later; else empty."""
    label, calls = Counter(out.unit.label for out in outputs).most_common(1)[0]
    if calls == 1:
        return ""
    for node in nodes_behind([loss.grad_fn], to_layers=True):
        if not node.name().startswith(("StackBackward", "CatBackward")):
            continue
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if len(edges) != calls or output_shapes(node)[0][0] != calls:
            continue
        stacks_numbers = all(math.prod(output_shapes(child)[index]) == 1 for child, index in edges)
        if calls > 1 + stacks_numbers and _are_apart([edge[0] for edge in edges]):
            return (
                f"{label} is called {calls} times with one row, and the results are stacked, so each call may be an "
                "example. Call the network once with all examples, or return the per-example losses as well: "
                '{"loss": loss, "per_example_loss": losses}.'
            )
    return ""


def _are_apart(nodes: Sequence[Any]) -> bool:
    """Whether each node depends on layer calls, and no two nodes depend on the same one."""
    layers = [{node for node in nodes_behind([root]) if is_measured(node)} for root in nodes]
    return all(layers) and sum(map(len, layers)) == len(set().union(*layers))
