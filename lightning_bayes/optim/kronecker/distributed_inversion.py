"""Inversions of many layers, distributed over processes: each inverts some, and one sum gives every result to all.

The costliest layer goes first, each to the process with the least work so far (Graham 1969,
https://doi.org/10.1137/0117039, at most 4/3 of the shortest possible time); a layer costs the cubes of its sides. A result
is zero on the processes that do not compute it, so the sum is exact, and the same bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import BayesError
from lightning_bayes.optim.kronecker import layer_state
from lightning_bayes.optim.kronecker.matrix_layers import MatrixLayer


class WorkerGroup(NamedTuple):
    """Processes that hold the same parameters and the same curvature.

    Attributes:
        rank: This process's number among them.
        size: Their number.
        add_: Replaces tensors by their sums over all of them.
    """

    rank: int
    size: int
    add_: Callable[[Sequence[Tensor]], object]


def assign(costs: Sequence[float], count: int) -> list[int]:
    """Distribute tasks.

    Args:
        costs: The cost of each task.
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


def invert_all(
    kinds: Mapping[MatrixLayer, Sequence[str]],
    states: Mapping[Any, dict[str, Any]],
    invert: Callable[[MatrixLayer], None],
    workers: WorkerGroup | None,
) -> None:
    """Invert layers; each on one process where several work together, and an error of one layer is raised on all.

    Args:
        kinds: The layers, in the same order on all processes, and the products that the inversion of each writes into the
            state of its weight: ``"inverse"``, ``"root"``.
        states: The optimizer's state by parameter.
        invert: Inverts one layer.
        workers: The processes; None for this one alone.
    """
    if workers is None or len(kinds) < 2:  # a single layer is inverted sooner than sent
        for layer in kinds:
            invert(layer)
    else:
        _distribute(kinds, states, invert, workers)


def _distribute(
    kinds: Mapping[MatrixLayer, Sequence[str]],
    states: Mapping[Any, dict[str, Any]],
    invert: Callable[[MatrixLayer], None],
    workers: WorkerGroup,
) -> None:
    owners = assign([layer.inversion_cost for layer in kinds], workers.size)
    for (layer, wanted), owner in zip(kinds.items(), owners, strict=True):
        state = states[layer.weight]
        if owner != workers.rank:
            layer_state.fill(state, wanted, 0.0)
        elif not _has_inverted(layer, invert):
            layer_state.fill(state, wanted, math.nan)
        layer_state.make_contiguous(state, wanted)
    results = [layer_state.sides(states[layer.weight], wanted) for layer, wanted in kinds.items()]
    workers.add_([side for sides in results for side in sides])
    finite = torch.stack([torch.stack([side.sum() for side in sides]).sum() for sides in results]).isfinite()
    for layer, is_finite in zip(kinds, finite.tolist(), strict=True):
        if not is_finite:
            invert(layer)  # raises the error of this layer


def _has_inverted(layer: MatrixLayer, invert: Callable[[MatrixLayer], None]) -> bool:
    """Invert, and return whether it succeeded: the other processes wait, so this one must not raise before the sum."""
    try:
        invert(layer)
    except BayesError:
        return False
    return True
