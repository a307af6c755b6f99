"""Numbers that tell whether a posterior is a healthy one, over all of its weights or those of one layer.

    noise to weight   √(Σ σ² / Σ μ²)        above 1 the noise drowns the weights
    data share        mean of 1 - P₀ σ²     P₀: the precision without the data; 0 where the curvature has collapsed
    step to noise     √(Σ Δμ² / Σ σ²)       above 1 the mean moves by more than the noise in one update

With P₀ = δ the data share times the number of weights is the number of well-determined parameters of MacKay 1992
(https://doi.org/10.1162/neco.1992.4.3.448).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict
from lightning_bayes.posteriors.mean_field import MeanField

LARGEST_SAMPLE = 2**20  # weights that quantiles are taken of


def layers_of(names: Collection[str]) -> dict[str, list[str]]:
    """Parameters by the module that holds them.

    Args:
        names: Names of parameters.

    Returns:
        Their names by the module's; a parameter of the root is a layer of its own.

    Example:
        >>> layers_of(["net.0.weight", "net.0.bias", "scale"])
        {'net.0': ['net.0.weight', 'net.0.bias'], 'scale': ['scale']}
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def marginals(posterior: AbstractPosterior, names: Collection[str]) -> MeanField:
    """Some of a posterior's weights, each by itself.

    Args:
        posterior: The posterior.
        names: Parameters to keep.

    Returns:
        Their means and variances as a mean-field posterior: the marginal, if the posterior is one.
    """
    return MeanField(
        {name: posterior.mean[name] for name in names},
        {name: variance.reciprocal() for name, variance in posterior.variance().items() if name in names},
        {name: posterior.prior_precision[name] for name in names},
        posterior.num_data,
        prior_mean={name: mean for name, mean in posterior.prior_mean.items() if name in names},
    )


def noise_to_weight(posterior: AbstractPosterior) -> float:
    """Root mean square of the noise in units of the weights'.

    Args:
        posterior: The posterior.

    Returns:
        √(Σ σ² / Σ μ²), infinite where all weights are zero.

    Example:
        >>> noise_to_weight(MeanField({"w": torch.full((2,), 3.0)}, {"w": torch.full((2,), 4.0)}, {"w": 1.0}, num_data=10))
        0.16666666666666666
    """
    return _ratio(posterior.variance(), _squares(posterior.mean))


def step_to_noise(steps: TensorDict, posterior: AbstractPosterior) -> float:
    """Root mean square of an update of the means in units of the noise's.

    Args:
        steps: Δμ of one update, by name of the parameter.
        posterior: The posterior after it.

    Returns:
        √(Σ Δμ² / Σ σ²).
    """
    return _ratio(_squares({name: steps[name] for name in posterior.mean}), posterior.variance())


def data_shares(posterior: AbstractPosterior, without_data: Mapping[str, Tensor | float]) -> TensorDict:
    """Share of each weight's precision that comes from the data's curvature.

    Args:
        posterior: The posterior.
        without_data: P₀ by name of the parameter: what the prior, and whatever else is not data, gives.

    Returns:
        1 - P₀ σ² by name: 0 where the data say nothing, 1 where they say all.

    Example:
        >>> q = MeanField({"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 4.0])}, {"w": 1.0}, num_data=10)
        >>> data_shares(q, {"w": torch.ones(2)})
        {'w': tensor([0.0000, 0.7500])}
    """
    return {name: 1 - without_data[name] * variance for name, variance in posterior.variance().items()}


def average(values: TensorDict) -> float:
    """Mean over all weights."""
    return _total(values) / sum(value.numel() for value in values.values())


def precision_quantiles(posterior: AbstractPosterior, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> list[float]:
    """Quantiles of 1/σ² over weights.

    Args:
        posterior: The posterior.
        levels: Between 0 and 1.

    Returns:
        One value per level. Of more than a million weights every n-th is looked at.
    """
    variances = torch.cat([variance.flatten() for variance in posterior.variance().values()])
    some = variances[:: -(-len(variances) // LARGEST_SAMPLE)].reciprocal().float()
    found: list[float] = torch.quantile(some, torch.tensor(levels, device=some.device)).tolist()
    return found


def _squares(tensors: TensorDict) -> TensorDict:
    return {name: tensor.square() for name, tensor in tensors.items()}


def _total(tensors: TensorDict) -> float:
    return float(torch.stack([tensor.sum(dtype=torch.float64) for tensor in tensors.values()]).sum())


def _ratio(above: TensorDict, below: TensorDict) -> float:
    denominator = _total(below)
    return math.sqrt(_total(above) / denominator) if denominator else math.inf
