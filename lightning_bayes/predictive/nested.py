"""Nested outputs under S samples: tuples, lists, dictionaries, dataclasses and `ModelOutput` with leaves ``[S, …]``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor


@final
class Differing:
    """The values of a leaf that cannot be stacked: objects that are no tensors, and tensors of several shapes."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)


def children_of(value: Any) -> dict[Any, Any] | None:
    """The entries of a container; None for a leaf."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def rebuilt(value: Any, children: Mapping[Any, Any]) -> Any:
    """A container like `value` with other entries."""
    if isinstance(value, (tuple, list)):
        items = list(children.values())
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy.copy(value)
    for key, child in children.items():
        if isinstance(value, Mapping):
            result[key] = child
        else:
            object.__setattr__(result, key, child)  # frozen dataclasses, too
    return result


def mapped(function: Callable[..., Any], *values: Any) -> Any:
    """The structure of the first value with leaves ``function(leaf, …)``; where structures differ, values are leaves."""
    entries = [children_of(value) for value in values]
    first = entries[0]
    if first is None or any(other is None or other.keys() != first.keys() for other in entries):
        return function(*values)
    inner = {key: mapped(function, *(entry[key] for entry in entries if entry is not None)) for key in first}
    return rebuilt(values[0], inner)


def refilled(structure: Any, values: Sequence[Any]) -> Any:
    """The same structure with these leaves, in order."""
    remaining = iter(values)
    return mapped(lambda _: next(remaining), structure)


def stacked(outputs: Sequence[Any]) -> Any:
    """One output whose tensors hold those of all samples, ``[S, …]``."""
    return mapped(_stack, *outputs)


def _stack(*values: Any) -> Any:
    first = values[0]
    if all(isinstance(value, Tensor) and value.shape == first.shape for value in values):
        return torch.stack(values)
    return Differing(values)


def of_sample(outputs: Any, index: int) -> Any:
    """The output of one sample."""
    return mapped(lambda leaf: leaf.values[index] if isinstance(leaf, Differing) else leaf[index], outputs)


def average(values: Tensor) -> Tensor:
    """The mean over samples of real or complex values ``[S, …]``; of whole numbers and truth values the most frequent."""
    if values.is_floating_point() or values.is_complex():
        return values.mean(0)
    return most_frequent(values)[0]


def most_frequent(values: Tensor, preferred: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The most frequent of whole numbers ``[S, …]``, and the fraction of samples that have it; of several, `preferred`."""
    mode = values.long().mode(0).values.to(values.dtype)
    fraction = (values == mode).float().mean(0)
    if preferred is not None:
        of_preferred = (values == preferred).float().mean(0)
        mode = torch.where(of_preferred == fraction, preferred, mode)
    return mode, fraction
