"""Nested outputs under S samples: tuples, lists, dictionaries, dataclasses and `ModelOutput` with leaves ``[S, …]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from lightning_bayes.likelihood.paths import mapped


@final
class Differing:
    """The values of a leaf that cannot be stacked: objects that are no tensors, and tensors of several shapes."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)


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
