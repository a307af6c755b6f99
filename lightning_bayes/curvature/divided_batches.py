"""Calls that divide the batch: on rows that a gate selects, or on one example each.

The selected rows of an example differ from batch to batch. If they match a layout, it is a coincidence. The record of the
forward pass tells which values were selected, scattered, packed or joined.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_bayes.curvature.layer_graph import LAYER, nodes_behind
from lightning_bayes.curvature.layouts import LayerOutput
from lightning_bayes.curvature.loss_reader import LossReader
from lightning_bayes.private_torch import output_shapes


def routed_calls(reader: LossReader, loss: Tensor, outputs: Sequence[LayerOutput], num_examples: int) -> set[int]:
    """Indices of the calls on selected rows, and of the calls whose output rows are scattered to selected positions."""
    index_of = {node: index for index, out in enumerate(outputs) for node, _ in out.edges}
    routed = {index for index, out in enumerate(outputs) if _has_selected_rows(reader, out, num_examples)}
    for node in reader.record.noted("scatter", nodes_behind([loss.grad_fn])):
        for child, index in node.next_functions:
            if child is not None:
                rows = output_shapes(child)[index][:1]
                reached = [index_of[layer] for layer in nodes_behind([child], to_layers=True) if layer in index_of]
                routed.update(call for call in reached if (outputs[call].rows,) == rows)
    return routed


def _has_selected_rows(reader: LossReader, output: LayerOutput, num_examples: int) -> bool:
    # Selected data with one row of each example, such as ``x[torch.randperm(n)]``, are a batch.
    if output.rows != num_examples and any(x in reader.record.of for x in output.data):
        return True
    ancestors = [node for source in output.sources for node in nodes_behind([source], to_layers=True)]
    # Packing sorts the examples, and unpacking restores their order, unless the layer uses the packed rows directly.
    selections = ((node, reader.record.at(node).selection) for node in ancestors)
    selecting = [*reader.record.noted("pack", ancestors)] or [
        node for node, each in selections if each and each.chooses_rows
    ]
    return any(output_shapes(node)[0][:1] == (output.rows,) for node in selecting)


def one_at_a_time(reader: LossReader, loss: Tensor, outputs: Sequence[LayerOutput]) -> str:
    """An error message if the examples seem to pass through the layers one by one and to be joined later; else empty."""
    label, calls = Counter(out.unit.label for out in outputs).most_common(1)[0]
    for node in reader.record.noted("join", nodes_behind([loss.grad_fn], to_layers=True)):
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if calls == 1 or len(edges) != calls or output_shapes(node)[0][0] != calls:
            continue
        joins_numbers = all(math.prod(output_shapes(child)[index]) == 1 for child, index in edges)
        if calls > 1 + joins_numbers and _are_apart([edge[0] for edge in edges]):
            return (
                f"{label} is called {calls} times with one row, and the results are joined, so each call may be an "
                "example. Call the network once with all examples, or return the per-example losses as well: "
                '{"loss": loss, "per_example_loss": losses}.'
            )
    return ""


def _are_apart(nodes: Sequence[Any]) -> bool:
    """Whether each node depends on layer calls, and no two nodes depend on the same one."""
    layers = [{node for node in nodes_behind([root]) if LAYER in node.metadata} for root in nodes]
    return all(layers) and sum(map(len, layers)) == len(set().union(*layers))
