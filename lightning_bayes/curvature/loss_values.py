"""The content of a node of a loss's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.loss_choices import Weights


@dataclass(frozen=True, eq=False)
class Values:
    """The content of a node.

    Attributes:
        kind: ``"examples"``, ``"mean"`` or ``"sum"`` of them, ``"part"`` for the sum of some examples' losses, or
            ``"unclear"``.
        why: A description of an unclear loss.
        layout: The layout of the examples, see `loss_graph`; None if it is not known.
        is_choice: Whether rows of the examples were chosen.
        example: Number of the example, if all rows are of one.
        num_chosen: How many rows or values were chosen.
        is_weighted: Whether constants weigh or mask the examples.
        num_added: Number of values that a sum added, or that each of the examples' values did.
        num_counted: Number of targets that count in a sum; 0 if all do.
        divisor: Number that a sum was divided by, if that is not a count.
        weights: By which constants weigh the values; None if there are none, or they are not known.
        counted: Which examples were chosen, ``[B]``, or are added in a part; None if that is not known.
        totals: Numbers that make a mean of a weighted sum, or of a sum of chosen values.
        pieces: Pieces of all rows that each hold every example once, and that the values come from.
        terms: Numbers of its terms in `LossReader.terms`.
    """

    kind: str
    why: str = ""
    layout: int | None = None
    is_choice: bool = False
    example: int | None = None
    num_chosen: int = 0
    is_weighted: bool = False
    num_added: int = 1
    num_counted: int = 0
    divisor: float = 1.0
    weights: Weights | None = None
    counted: Tensor | None = None
    totals: tuple[float, ...] = ()
    pieces: frozenset[Any] = frozenset()
    terms: tuple[int, ...] = ()


def choice_of(values: Values) -> Values:
    """The content of the chosen examples alone."""
    return Values(
        values.kind,
        is_choice=values.is_choice,
        example=values.example,
        num_chosen=values.num_chosen,
        counted=values.counted,
    )


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two sets of examples are equal."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def one_hot(example: int, batch_size: int) -> Tensor:
    """A mark at one example, ``[B]``."""
    return torch.arange(batch_size) == example


def unclear(why: str) -> Values:
    """Values of which it is not known how they hold the examples."""
    return Values("unclear", why=why)
