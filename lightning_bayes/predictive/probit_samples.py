"""Samples of logits whose average is the probit approximation, so that its prediction has a mutual information too.

    z_s = f + b + √v ∘ ε_s        b such that  mean_s softmax(z_s) = p,  the prediction

b is found by b ← b + log p - log mean_s softmax(z_s), which scales the columns of a positive matrix whose rows softmax
normalises (Sinkhorn 1967, https://doi.org/10.2307/2314570). As in the probit approximation, outputs are independent.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_ITERATIONS: Final = 100  # a variance of 100 leaves errors of 1e-3
_TOLERANCE: Final = 1e-6  # of probabilities


def probit_samples(
    outputs: Tensor, variance: Tensor, prediction: Tensor, count: int, dim: int, seed: int = 0
) -> Tensor:
    """S logits ``[S, batch, …]`` of N(f + b, v) whose mean probability is that of `prediction`; classes in `dim`."""
    if count == 1:
        return prediction[None]
    deviations = _deviations(count, outputs.shape[1:], seed).to(outputs.device) * variance.double().sqrt()
    centre, target = outputs.double(), prediction.double().log_softmax(dim)
    for _ in range(_ITERATIONS):
        found = (centre + deviations).log_softmax(dim if dim < 0 else dim + 1).logsumexp(0) - math.log(count)
        centre = centre + target - found
        if float((found.exp() - target.exp()).abs().max()) < _TOLERANCE:
            break
    return (centre + deviations).to(outputs.dtype)


def _deviations(count: int, shape: torch.Size, seed: int) -> Tensor:
    """Normal values ``[S, 1, …]`` with mean 0 and mean square 1 over samples."""
    values = torch.randn(count, 1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    values = values - values.mean(0)
    return values / values.square().mean(0).sqrt()
