"""Layer inversions distributed over processes: each process inverts some layers, and one all-reduce shares the results.

Layers are assigned in order of decreasing cost, each to the process with the least work so far. The makespan is at most 4/3
of the optimum (Graham 1969, https://doi.org/10.1137/0117039). The cost of a layer is the sum of the cubes of its sides. A
result is zero on all processes but one, so the sum is exact and bitwise identical everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bayes.errors import BayesError
from lightning_bayes.linalg import KroneckerProduct
from lightning_bayes.optim.kronecker.layer import KroneckerLayer, entries


class WorkerGroup(NamedTuple):
    """Processes with identical parameters and curvature."""

    rank: int
    size: int
    add_: Callable[[Sequence[Tensor]], object]


def assign(costs: Sequence[float], count: int) -> list[int]:
    """Ranks of `count` processes for tasks of these costs, so that the loads are balanced."""
    loads, owners = [0.0] * count, [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: -costs[task]):
        owners[task] = loads.index(min(loads))
        loads[owners[task]] += costs[task]
    return owners


def invert_all(
    factors: Mapping[KroneckerLayer, KroneckerProduct], workers: WorkerGroup | None
) -> dict[KroneckerLayer, dict[str, Tensor]]:
    """Invert layers, each on one process; an error in any layer is raised on all processes."""
    if workers is None or len(factors) < 2:  # inverting a single layer is faster than communicating the result
        return {layer: layer.invert(product) for layer, product in factors.items()}
    likes = [entries(product, *layer.inverted_kinds()) for layer, product in factors.items()]
    owners = assign(
        [sum(tensor.numel() * tensor.shape[-1] for tensor in like.values()) for like in likes], workers.size
    )
    results = {}
    for (layer, product), like, owner in zip(factors.items(), likes, owners, strict=True):
        if owner != workers.rank:
            result = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        else:
            try:
                result = layer.invert(product)
            except BayesError:  # the other processes wait, so this one must not raise before the sum
                result = {name: torch.full_like(tensor, math.nan) for name, tensor in like.items()}
        # The memory layout affects rounding in matrix products.
        results[layer] = {name: tensor.contiguous() for name, tensor in result.items()}
    workers.add_([tensor for result in results.values() for tensor in result.values()])
    sums = [torch.stack([tensor.sum() for tensor in result.values()]).sum() for result in results.values()]
    for (layer, product), is_finite in zip(factors.items(), torch.stack(sums).isfinite().tolist(), strict=True):
        if not is_finite:
            layer.invert(product)  # raises the layer's error
    return results
