"""Packed sequences: one call of the rule per sequence length, so that the last states belong to the last steps.

c_i  for examples of length L  =  the rule of the recurrent layer on x_i1 … x_iL
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
    """Pad packed sequences and append their lengths ``[B]``; refuse random dropout between layers."""
    if not isinstance(inputs[0], PackedSequence):
        return inputs
    if layer.training and layer.dropout and layer.num_layers > 1:
        raise UnsupportedLayerError(
            f"{type(layer).__name__} draws dropout={layer.dropout} between its layers on a PackedSequence, which "
            "cannot be repeated. Set its dropout to 0 and use nn.Dropout on padded outputs, or pass padded sequences."
        )
    x, lengths = pad_packed_sequence(inputs[0], batch_first=layer.batch_first)
    return x, inputs[1], lengths.to(x.device)


def padded_output(layer: nn.Module, output: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The output of a layer with padded sequences, and a function that packs such an output again."""
    if not (isinstance(output, tuple) and isinstance(output[0], PackedSequence)):
        return output, lambda unpacked_output: unpacked_output
    packed, batch_first = output[0], bool(layer.batch_first)
    padded, lengths = pad_packed_sequence(packed, batch_first=batch_first)

    def pack(padded_outputs: Any) -> Any:
        order = packed.sorted_indices
        x = padded_outputs[0] if order is None else padded_outputs[0].index_select(0 if batch_first else 1, order)
        data = pack_padded_sequence(x, lengths if order is None else lengths[order.cpu()], batch_first).data
        return PackedSequence(data, packed.batch_sizes, order, packed.unsorted_indices), *padded_outputs[1:]

    return (padded, *output[1:]), pack


def contributions_by_length(rule: LayerRule, layer: nn.RNNBase, inputs: Inputs, grad_output: Any) -> PerExample:
    """Per-example contributions of a call with lengths."""
    contributions: PerExample = {}
    count = len(inputs[2])
    for rows, part_inputs, part_grads in _by_length(layer, inputs, grad_output):
        for name, part in rule.contributions(layer, part_inputs, part_grads).items():
            contributions.setdefault(name, part.new_zeros(count, *part.shape[1:]))[rows] = part
    return contributions


def sums_by_length(
    sums: Callable[..., Sums], layer: nn.RNNBase, inputs: Inputs, grad_output: Any, workspace: Workspace
) -> Sums:
    """Sums of contributions and of their squares of a call with lengths."""
    total: Sums = {}
    for _, part_inputs, part_grads in _by_length(layer, inputs, grad_output):
        for name, (grad, square) in sums(layer, part_inputs, part_grads, workspace).items():
            if name in total:
                grad, square = total[name][0] + grad, total[name][1] + square
            total[name] = (grad, square)
    return total


def _by_length(layer: nn.RNNBase, inputs: Inputs, grad_output: Any) -> Iterator[tuple[Tensor, Inputs, Any]]:
    """For each length: the indices of the examples, their inputs and their output gradients."""
    x, states, lengths = inputs
    batch_dim, time_dim = (0, 1) if layer.batch_first else (1, 0)
    grad, *state_grads = grad_output
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0]
        part = x.index_select(batch_dim, rows).narrow(time_dim, 0, length)
        part_grad = None if grad is None else grad.index_select(batch_dim, rows).narrow(time_dim, 0, length)
        part_state_grads = (_select_states(state_grad, rows) for state_grad in state_grads)
        yield rows, (part, _select_states(states, rows)), (part_grad, *part_state_grads)


def _select_states(state: Any, rows: Tensor) -> Any:
    if isinstance(state, tuple):
        return tuple(_select_states(part, rows) for part in state)
    return None if state is None else state.index_select(1, rows)


def is_packed(values: Any) -> bool:
    """Whether any of the values is a packed sequence."""
    return any(isinstance(value, PackedSequence) for value in values)
