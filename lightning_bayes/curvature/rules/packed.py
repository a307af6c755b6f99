"""Packed sequences: every length on its own, so that the last states are those of the last steps.

c_i  of the examples of length L  =  the rule of the recurrent layer on x_i1 … x_iL
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_bayes.curvature.rules.registry import Inputs, LayerRule, PerExample, Sums
from lightning_bayes.curvature.workspace import Workspace
from lightning_bayes.errors import UnsupportedLayerError


def unpacked(layer: nn.RNNBase, inputs: Inputs) -> Inputs:
    """The arguments of a call; of packed sequences the padded ones, with their lengths ``[B]`` behind the first states.

    Args:
        layer: The layer.
        inputs: Its arguments.

    Returns:
        Padded sequences, first states, lengths.

    Raises:
        UnsupportedLayerError: If the layer draws a dropout that no sequence could repeat.
    """
    if not isinstance(inputs[0], PackedSequence):
        return inputs
    if layer.training and layer.dropout and layer.num_layers > 1:
        raise UnsupportedLayerError(
            f"{type(layer).__name__} draws dropout={layer.dropout} between its layers on a PackedSequence, whose draws "
            "cannot be repeated. Set its dropout to 0, with nn.Dropout on padded outputs instead, or pass padded sequences."
        )
    x, lengths = pad_packed_sequence(inputs[0], batch_first=layer.batch_first)
    return x, inputs[1], lengths.to(x.device)


def padded_output(layer: nn.Module, output: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The output of a layer with its sequences padded, and the function that packs such an output again."""
    if not (isinstance(output, tuple) and isinstance(output[0], PackedSequence)):
        return output, lambda found: found
    packed, batch_first = output[0], bool(layer.batch_first)
    padded, lengths = pad_packed_sequence(packed, batch_first=batch_first)

    def pack(found: Any) -> Any:
        order = packed.sorted_indices
        x = found[0] if order is None else found[0].index_select(0 if batch_first else 1, order)
        data = pack_padded_sequence(x, lengths if order is None else lengths[order.cpu()], batch_first).data
        return PackedSequence(data, packed.batch_sizes, order, packed.unsorted_indices), *found[1:]

    return (padded, *output[1:]), pack


def contributions_by_length(rule: LayerRule, layer: nn.RNNBase, inputs: Inputs, grad_output: Any) -> PerExample:
    """Per-example contributions of a call with lengths."""
    found: PerExample = {}
    count = len(inputs[2])
    for rows, some, grads in _by_length(layer, inputs, grad_output):
        for name, own in rule.contributions(layer, some, grads).items():
            found.setdefault(name, own.new_zeros(count, *own.shape[1:]))[rows] = own
    return found


def sums_by_length(
    sums: Callable[..., Sums], layer: nn.RNNBase, inputs: Inputs, grad_output: Any, workspace: Workspace
) -> Sums:
    """Sums of contributions and of their squares of a call with lengths."""
    total: Sums = {}
    for _, some, grads in _by_length(layer, inputs, grad_output):
        for name, (grad, square) in sums(layer, some, grads, workspace).items():
            before = total.get(name)
            total[name] = (grad, square) if before is None else (before[0] + grad, before[1] + square)
    return total


def _by_length(layer: nn.RNNBase, inputs: Inputs, grad_output: Any) -> Iterator[tuple[Tensor, Inputs, Any]]:
    x, first, lengths = inputs
    batch, time = (0, 1) if layer.batch_first else (1, 0)
    grad, *of_last = grad_output
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0]
        some = x.index_select(batch, rows).narrow(time, 0, length)
        own = None if grad is None else grad.index_select(batch, rows).narrow(time, 0, length)
        yield rows, (some, _of_rows(first, rows)), (own, *(_of_rows(last, rows) for last in of_last))


def _of_rows(state: Any, rows: Tensor) -> Any:
    if isinstance(state, tuple):
        return tuple(_of_rows(each, rows) for each in state)
    return None if state is None else state.index_select(1, rows)


def is_packed(values: Any) -> bool:
    """Whether any of some arguments is packed."""
    return any(isinstance(value, PackedSequence) for value in values)
