"""Temperature scaling (Guo et al. 2017, https://arxiv.org/abs/1706.04599) of a point estimate or a sampled posterior.

    p̄_T(y | x) = (1/S) Σ_s softmax(f_s(x) / T)_y        T = argmin - mean_i log p̄_T(y_i | x_i)

With a shrinkage σ, log T minimises Σ_i - log p̄_T(y_i | x_i) + (log T)² / 2σ² instead: T stays near 1 on a few examples, and
many overrule it. The mean over i runs over validation examples. T divides the logits of every sample before the average, so
it minimises the NLL of the averaged prediction. With several samples the NLL need not be convex in T, so the search starts
on a grid and uses no derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from lightning_bayes.errors import NonFiniteError, ShapeError
from lightning_bayes.likelihood import Categorical
from lightning_bayes.likelihood.line_search import minimise_over_logarithm
from lightning_bayes.likelihood.scoring import target_nlls

SHRINKAGE = 0.2  # σ of log T that calibrations use; see docs/defaults.md
SMALLEST, LARGEST = 0.05, 20.0  # bounds of T; a network beyond them is broken rather than uncalibrated
_GRID = 31  # grid points, 22 % apart in T
_TOLERANCE = 1e-6  # of log T


def fit_temperature(
    outputs: Tensor,
    targets: Tensor,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
    shrinkage: float = math.inf,
) -> float:
    """Find the temperature with the lowest NLL.

    Args:
        outputs: Logits of validation examples, ``[samples, batch, classes]`` or ``[batch, classes]``.
        targets: Class indices, ``[batch]``.
        reduce: Sums a scalar over processes that each hold some of the examples. All processes return the same T.
        shrinkage: σ, positive: the standard deviation of a Gaussian prior of log T around 0. `SHRINKAGE` suits any number
            of examples; infinity, the default, is the maximum likelihood of the paper and needs some hundred.

    Returns:
        T, between `SMALLEST` and `LARGEST`; above 1 if predictions are overconfident. T is at a bound if the NLL has no
        minimum in between, for example if no prediction is wrong.

    Raises:
        ShapeError: If the shapes do not match, there are no examples, or a target is not a class index.
        NonFiniteError: If a logit is not finite.

    Example:
        >>> import torch
        >>> logits, targets = torch.tensor([[4.0, 0.0]]).expand(4, 2), torch.tensor([0, 0, 0, 1])
        >>> round(fit_temperature(logits, targets), 3)  # 4 / log 3 scales the confidence to the accuracy, 0.75
        3.641
    """
    samples = outputs if outputs.ndim == 3 else outputs.unsqueeze(0)
    if samples.ndim != 3 or targets.shape != samples.shape[1:2] or len(targets) == 0:
        raise ShapeError(
            f"Temperature scaling needs logits [samples, batch, classes] or [batch, classes] and targets [batch] of at "
            f"least one example, got {list(outputs.shape)} and {list(targets.shape)}."
        )
    if bool(((targets < 0) | (targets >= samples.shape[-1])).any()):
        raise ShapeError(
            f"Targets must be class indices from 0 to {samples.shape[-1] - 1}, but lie between {targets.min()} and "
            f"{targets.max()}. Leave out examples whose class is unknown or not a class of the model."
        )
    if not bool(samples.isfinite().all()):
        bad = int((~samples.isfinite()).flatten(2).any(-1).any(0).sum())
        raise NonFiniteError(
            f"{bad} of {len(targets)} examples have logits that are not finite. Look for nan or infinity in the inputs and "
            "weights of the model."
        )

    def nll(temperature: float) -> float:
        nlls = target_nlls(Categorical(), samples, targets, temperature=temperature)
        return float(reduce(nlls.sum())) + penalty(temperature, shrinkage)

    return minimise_over_logarithm(nll, SMALLEST, LARGEST, _GRID, _TOLERANCE)


def penalty(factor: float, std: float) -> float:
    """(log factor)² / 2σ²: what it costs, in nats, that a positive factor is not 1."""
    return (math.log(factor) / std) ** 2 / 2
