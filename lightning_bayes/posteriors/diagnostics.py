"""Health checks of a posterior, over all weights or per layer.

    noise to weight   √(Σ σ² / Σ μ²)        above 1 the noise drowns the weights
    data share        mean of 1 - P₀ σ²     P₀: precision without the data; 0 if the curvature has collapsed
    step to noise     √(Σ Δμ² / Σ σ²)       above 1 one update moves the mean by more than the noise

With P₀ = δ, the data share times the number of weights is the number of well-determined parameters (MacKay 1992,
https://doi.org/10.1162/neco.1992.4.3.448).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict
from lightning_bayes.posteriors.mean_field import MeanField

LARGEST_SAMPLE = 2**20  # maximum number of weights for quantiles


def layers_of(names: Collection[str]) -> dict[str, list[str]]:
    """Parameter names by module name. Each parameter of the root module is a separate layer."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def marginals(posterior: AbstractPosterior, names: Collection[str]) -> MeanField:
    """The marginals of the named parameters: a mean-field posterior with the same means and variances."""
    return MeanField(
        {name: posterior.mean[name] for name in names},
        {name: variance.reciprocal() for name, variance in posterior.variance().items() if name in names},
        {name: posterior.prior_precision[name] for name in names},
        posterior.num_data,
        prior_mean={name: mean for name, mean in posterior.prior_mean.items() if name in names},
    )


def noise_to_weight(posterior: AbstractPosterior) -> float:
    """Root mean square of the noise divided by that of the weights, √(Σ σ² / Σ μ²); infinite if all weights are zero."""
    return _ratio(posterior.variance(), _squares(posterior.mean))


def step_to_noise(steps: TensorDict, posterior: AbstractPosterior) -> float:
    """√(Σ Δμ² / Σ σ²): root mean square of an update divided by the root mean square of the noise after it."""
    return _ratio(_squares({name: steps[name] for name in posterior.mean}), posterior.variance())


def data_shares(posterior: AbstractPosterior, without_data: Mapping[str, Tensor | float]) -> TensorDict:
    """Fraction of each weight's precision that comes from the data: 1 - P₀ σ², where P₀ is the precision without data."""
    return {name: 1 - without_data[name] * variance for name, variance in posterior.variance().items()}


def average(values: TensorDict) -> float:
    """Mean over all weights."""
    return _total(values) / sum(value.numel() for value in values.values())


def precision_quantiles(posterior: AbstractPosterior, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> list[float]:
    """Quantiles of 1/σ² over weights; above `LARGEST_SAMPLE` weights, over every n-th weight."""
    variances = torch.cat([variance.flatten() for variance in posterior.variance().values()])
    stride = math.ceil(len(variances) / LARGEST_SAMPLE)
    precisions = variances[::stride].reciprocal().float()
    quantiles: list[float] = torch.quantile(precisions, torch.tensor(levels, device=precisions.device)).tolist()
    return quantiles


def _squares(tensors: TensorDict) -> TensorDict:
    return {name: tensor.square() for name, tensor in tensors.items()}


def _total(tensors: TensorDict) -> float:
    return float(torch.stack([tensor.sum(dtype=torch.float64) for tensor in tensors.values()]).sum())


def _ratio(squares: TensorDict, reference_squares: TensorDict) -> float:
    reference = _total(reference_squares)
    return math.sqrt(_total(squares) / reference) if reference else math.inf
