"""Layer inversions distributed over processes: each process inverts some layers, and one all-reduce shares the results.

Layers are assigned in order of decreasing cost, each to the process with the least work so far. The makespan is at most 4/3
of the optimum (Graham 1969, https://doi.org/10.1137/0117039). The cost of a layer is the sum of the cubes of its sides. A
result is zero on all processes but one, so the sum is exact and bitwise identical everywhere.
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
    """Processes with identical parameters and curvature.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        add_: Replaces tensors by their sums over all processes.
    """

    rank: int
    size: int
    add_: Callable[[Sequence[Tensor]], object]


def assign(costs: Sequence[float], count: int) -> list[int]:
    """Assign tasks to processes so that the loads are balanced.

    Args:
        costs: Cost of each task.
        count: Number of processes.

    Returns:
        Rank of the process for each task.

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
    kinds_of: Mapping[MatrixLayer, Sequence[str]],
    states: Mapping[Any, dict[str, Any]],
    invert: Callable[[MatrixLayer], None],
    workers: WorkerGroup | None,
) -> None:
    """Invert layers, each on one process; an error in any layer is raised on all processes.

    Args:
        kinds_of: The layers, in the same order on all processes, with the products that each inversion writes into the state
            of the layer's weight: ``"inverse"``, ``"root"``.
        states: Optimizer states by parameter.
        invert: Inverts one layer.
        workers: The processes; None inverts all layers in this process.
    """
    if workers is None or len(kinds_of) < 2:  # inverting a single layer is faster than communicating the result
        for layer in kinds_of:
            invert(layer)
        return
    owners = assign([layer.inversion_cost for layer in kinds_of], workers.size)
    for (layer, kinds), owner in zip(kinds_of.items(), owners, strict=True):
        state = states[layer.weight]
        if owner != workers.rank:
            layer_state.fill(state, kinds, 0.0)
        else:
            try:
                invert(layer)
            except BayesError:  # the other processes wait, so this one must not raise before the sum
                layer_state.fill(state, kinds, math.nan)
        layer_state.make_contiguous(state, kinds)
    results = [layer_state.sides(states[layer.weight], kinds) for layer, kinds in kinds_of.items()]
    workers.add_([side for sides in results for side in sides])
    finite = torch.stack([torch.stack([side.sum() for side in sides]).sum() for sides in results]).isfinite()
    for layer, is_finite in zip(kinds_of, finite.tolist(), strict=True):
        if not is_finite:
            invert(layer)  # raises the layer's error
