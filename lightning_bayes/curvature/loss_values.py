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
class Counted:
    """The examples that a mask, indices, a slice or weights count."""

    examples: Tensor | None = None  # mask of the examples with a selected or weighted value, [B]; None if unknown
    totals: tuple[float, ...] = ()  # divisors that turn a sum into the mean over these examples


Scales: TypeAlias = frozenset[float]  # numbers by which values or summands were multiplied since a nonlinear operation
UNSCALED: Scales = frozenset({1})
Place: TypeAlias = int | Counted | None  # the layout, the selected examples, or None if it is unknown


@dataclass(frozen=True, eq=False)
class Examples:
    """Values of the examples."""

    place: Place = None  # where they are, see `loss_places`
    is_weighted: bool = False  # whether they depend on values with constant factors or masks
    num_added: int = 1  # number of values that were added up to each value
    scales: Scales = UNSCALED
    pieces: frozenset[Any] = (
        frozenset()
    )  # edges of the pieces (`loss_places.layout_of_piece`) that the values depend on

    @property
    def layout(self) -> int | None:
        """The layout; None if it is unknown or some examples are selected."""
        return self.place if isinstance(self.place, int) else None

    @property
    def selection(self) -> Counted | None:
        """The selected examples; None if no examples were left out."""
        return self.place if isinstance(self.place, Counted) else None


@dataclass(frozen=True, eq=False)
class Part:
    """Values computed from one example, or the sum of such values over several examples."""

    examples: Tensor  # mask of these examples, [B]
    divisor: float = 1.0  # integer that the values were divided by
    scales: Scales = UNSCALED

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
    counted: Counted = Counted()
    terms: tuple[int, ...] = ()  # indices into `LossReader.terms`


@dataclass(frozen=True)
class Unclear:
    """A value that may be a mean or a sum over the examples, or neither."""

    why: str  # predicate of an error message about the loss


Content: TypeAlias = Examples | Part | Reduced | Unclear


def is_same(one: Counted, other: Counted) -> bool:
    """Whether the same examples count. Unknown examples are the same ones."""
    if one.examples is None or other.examples is None:
        return one.examples is other.examples
    return torch.equal(one.examples, other.examples)
