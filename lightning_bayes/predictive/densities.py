"""The negative log-likelihood of a sampled prediction: each target's density is averaged over samples.

    NLL = -Σ_i log (1/S) Σ_s p(y_i | f_s(x_i))

The link determines p: p ∝ exp f for the classes of the softmax, p(1) = sigmoid f for independent binary labels, and
y ~ N(f, σ²) for the identity link, y ~ Poisson(exp f) for "exp". Sums run in float64, in blocks of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.likelihood.scoring import fit_noise_std
from lightning_bayes.predictive.links import Link

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over processes
LogDensity = Callable[[Tensor, Tensor], Tensor]  # (outputs [S, B, …], targets [B, …]) → [S, B, …]

BLOCK = 2**22  # outputs per block, in float64


def predictive_nll(
    outputs: Tensor,
    targets: Tensor,
    link: Link,
    noise_std: float | None = None,
    reduce: Reduce = lambda total: total,
) -> float:
    """Negative log-likelihood of a sampled prediction in nats per target; None fits `noise_std` to the targets."""
    if outputs.dim() < 2 or len(outputs) == 0 or targets.shape[:1] != outputs.shape[1:2]:
        raise ShapeError(
            f"A predictive NLL needs outputs [samples, examples, …] and targets [examples, …], got "
            f"{list(outputs.shape)} and {list(targets.shape)}."
        )
    if link == "softmax_last":
        outputs, link = outputs.movedim(-1, 2), "softmax"
    if link != "softmax":
        targets = shaped_like_sample(targets, outputs)
    has_class_probs = link == "softmax" and targets.is_floating_point()
    num_targets = len(targets) if has_class_probs else targets.numel()
    count = float(reduce(torch.tensor(float(num_targets))))
    if count == 0:
        raise ShapeError("A predictive NLL needs at least one target.")
    if noise_std is not None and not 0 < noise_std < math.inf:
        raise HyperparameterError(
            f"noise_std={noise_std} must be positive and finite. Pass the standard deviation of the noise in the units of "
            "the targets, or None to fit it to them."
        )
    if link == "identity":
        std = fit_noise_std(outputs, targets, reduce) if noise_std is None else noise_std
        density: LogDensity = partial(gaussian_log_density, std=std)
    else:
        density = _DENSITIES[link]
    return float(reduce(nll_sum_of(density, outputs, targets))) / count


def nll_sum_of(density: LogDensity, outputs: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood summed over targets, in nats and float64; outputs ``[S, B, …]``, targets ``[B, …]``."""
    samples = len(outputs)
    block_size = max(1, BLOCK // max(1, outputs[:, :1].numel()))
    total = torch.zeros((), dtype=torch.float64, device=outputs.device)
    blocks = zip(torch.split(outputs, block_size, 1), torch.split(targets, block_size), strict=True)
    for block_outputs, block_targets in blocks:
        total -= (density(block_outputs.double(), block_targets).logsumexp(0) - math.log(samples)).sum()
    return total


def class_log_density(outputs: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities; outputs are logits ``[S, B, C, …]``, targets class indices ``[B, …]`` or probabilities."""
    logits = outputs.flatten(0, 1)
    repeated = targets.expand(len(outputs), *targets.shape).flatten(0, 1)
    repeated = repeated.to(logits.dtype) if repeated.is_floating_point() else repeated.long()
    return -torch.unflatten(F.cross_entropy(logits, repeated, reduction="none"), 0, outputs.shape[:2])


def bernoulli_log_density(outputs: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of independent binary labels; logits ``[S, B, …]``, targets ``[B, …]``."""
    return -F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype).expand_as(outputs), reduction="none")


def poisson_log_density(outputs: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of counts; log-rates ``[S, B, …]``, targets ``[B, …]``."""
    counts = targets.to(outputs.dtype)
    return counts * outputs - outputs.exp() - torch.lgamma(counts + 1)


_DENSITIES: Final[dict[Link, LogDensity]] = {
    "softmax": class_log_density,
    "sigmoid": bernoulli_log_density,
    "exp": poisson_log_density,
}


def gaussian_log_density(outputs: Tensor, targets: Tensor, std: float) -> Tensor:
    """Log N(y; f, σ²) of every target; outputs ``[S, B, …]``, targets ``[B, …]``."""
    scaled: Tensor = (targets.to(outputs.dtype) - outputs) / std
    return -0.5 * scaled.square() - math.log(std) - 0.5 * math.log(2 * math.pi)


def shaped_like_sample(targets: Tensor, outputs: Tensor) -> Tensor:
    """Reshape targets to the shape of one sample's outputs; ``[B]`` becomes ``[B, 1]``, for example."""
    if targets.numel() != outputs[0].numel():
        raise ShapeError(
            f"Each output of a sample needs one target, but outputs are {list(outputs.shape)}, with the samples first, and "
            f"targets {list(targets.shape)}."
        )
    return targets.reshape(outputs.shape[1:])
