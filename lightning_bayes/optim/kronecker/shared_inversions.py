"""Inversions of many layers, spread over processes: each inverts a part, and one sum over all gives every result to all.

Costliest layer first, each to the process that has least to do so far (Graham 1969, https://doi.org/10.1137/0117039, which
takes at most 4/3 of the least possible time); a layer costs the cubes of its sides. What a process does not invert is zero
there, so the sum is exact, and the same bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import BayesError
from lightning_bayes.optim.kronecker import matrix_state
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer


class Partners(NamedTuple):
    """Processes that hold the same parameters and the same curvature.

    Attributes:
        rank: Which of them this is.
        size: How many they are.
        add_: Replaces tensors by their sums over all of them.
    """

    rank: int
    size: int
    add_: Callable[[Sequence[Tensor]], object]


def assign(costs: Sequence[float], count: int) -> list[int]:
    """Share out tasks.

    Args:
        costs: Of each task.
        count: Number of processes.

    Returns:
        The process of each task.

    Example:
        >>> assign([1.0, 3.0, 2.0, 5.0], 2)
        [0, 1, 1, 0]
    """
    loads, owners = [0.0] * count, [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
        owners[task] = loads.index(min(loads))
        loads[owners[task]] += costs[task]
    return owners


def invert_together(
    layers: Sequence[MatrixLayer],
    states: Sequence[matrix_state.State],
    kinds: Sequence[Sequence[str]],
    invert: Callable[[MatrixLayer], None],
    partners: Partners,
) -> None:
    """Invert layers, each on one process; a layer that cannot be inverted is the same error on all.

    Args:
        layers: The layers, alike on all processes.
        states: The state of each layer's weight.
        kinds: What inverting a layer leaves there: ``"inverse"``, ``"root"``.
        invert: Inverts one layer.
        partners: The processes.
    """
    owners = assign([layer.inversion_cost for layer in layers], partners.size)
    for layer, state, wanted, owner in zip(layers, states, kinds, owners, strict=True):
        if owner != partners.rank:
            matrix_state.fill(state, wanted, 0.0)
        elif not _has_inverted(layer, invert):
            matrix_state.fill(state, wanted, math.nan)
        matrix_state.lay_out_by_rows(state, wanted)
    results = [matrix_state.sides(state, wanted) for state, wanted in zip(states, kinds, strict=True)]
    partners.add_([side for sides in results for side in sides])
    finite = torch.stack([torch.stack([side.sum() for side in sides]).sum() for sides in results]).isfinite()
    for layer, is_finite in zip(layers, finite.tolist(), strict=True):
        if not is_finite:
            invert(layer)  # which says what is wrong with it


def _has_inverted(layer: MatrixLayer, invert: Callable[[MatrixLayer], None]) -> bool:
    """Whether it succeeded: the others wait for this process, so it may not end before the sum."""
    try:
        invert(layer)
    except BayesError:
        return False
    return True
