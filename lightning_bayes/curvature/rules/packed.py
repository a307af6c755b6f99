"""Packed sequences as padded sequences and their lengths, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_bayes.curvature.rules.registry import Inputs
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


def is_packed(values: Any) -> bool:
    """Whether any of the values is a packed sequence."""
    return any(isinstance(value, PackedSequence) for value in values)
