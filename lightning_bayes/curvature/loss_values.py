"""What a node of a loss's graph can hold, for a batch of B examples.

`Examples`   values of the examples, not reduced over the batch yet
`Part`       values computed from one example, or the sum over some examples, as in a loop over examples
`Reduced`    the mean or the sum over the examples
`Unclear`    anything else
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows or values that a mask, indices or a slice selected."""

    examples: Tensor | None = None  # mask of the examples with selected values, [B]; None if unknown
    num_selected: int = 0  # number of selected rows or values


@dataclass(frozen=True, eq=False)
class Examples:
    """Values of the examples."""

    layout: int | None = None  # see `loss_graph`; None if unknown
    selection: Selection | None = None  # None if no examples were left out
    is_weighted: bool = False  # whether they depend on values with constant factors or masks
    num_added: int = 1  # number of values that were added up to each value
    pieces: frozenset[Any] = frozenset()  # edges of the pieces (`loss_graph.layout_of_piece`) that the values depend on


@dataclass(frozen=True, eq=False)
class Part:
    """Values computed from one example, or the sum of such values over several examples."""

    examples: Tensor  # mask of these examples, [B]
    divisor: float = 1.0  # integer that the values were divided by

    def has_only(self, examples: Tensor) -> bool:
        """Whether it is computed from a single example, the one in this mask."""
        return int(examples.sum()) == 1 and torch.equal(self.examples, examples)


@dataclass(frozen=True, eq=False)
class Reduced:
    """The mean or the sum of the values of the examples."""

    kind: str  # "mean" or "sum"
    is_selected: bool = False
    is_weighted: bool = False
    num_added: int = 1  # number of values in a sum
    num_counted: int = 0  # number of targets in a sum that are not `ignore_index`; 0 if none can be
    divisor: float = 1.0  # of a sum, if it is not the number of values or examples
    examples: Tensor | None = None  # mask of the examples with a selected value or nonzero weight, [B]
    totals: tuple[float, ...] = ()  # divisors that turn a sum into the mean over `examples`
    terms: tuple[int, ...] = ()  # indices into `LossReader.terms`


@dataclass(frozen=True)
class Unclear:
    """A value that may be a mean or a sum over the examples, or neither."""

    why: str  # predicate of an error message about the loss


Content: TypeAlias = Examples | Part | Reduced | Unclear


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two masks of examples are equal."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))
