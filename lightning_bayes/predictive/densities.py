"""The negative log-likelihood of a sampled prediction: densities are averaged over samples, target by target.

    NLL = -Σ_i log (1/S) Σ_s p(y_i | f_s(x_i))

p follows from the link: classes with p ∝ exp f (softmax), independent labels with p(1) = sigmoid f, and y ~ N(f, σ²) for the
identity. Sums run in float64, in blocks of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_bayes.errors import ShapeError
from lightning_bayes.predictive.line_search import minimise_over_logarithm
from lightning_bayes.predictive.links import Link

Reduce = Callable[[Tensor], Tensor]  # adds a scalar up over processes
LogDensity = Callable[[Tensor, Tensor], Tensor]  # of outputs [S, B, …] and targets [B, …]; [S, B, …]

_BLOCK = 2**22  # outputs per block, in float64
_NOISE_GRID = 15  # steps of a factor 1.4 in σ
_TOLERANCE = 1e-4  # of log σ


def predictive_nll(
    outputs: Tensor,
    targets: Tensor,
    link: Link,
    noise_std: float | None = None,
    reduce: Reduce = lambda total: total,
) -> float:
    """Mean over targets of the negative log-likelihood of a sampled prediction.

    Args:
        outputs: Outputs under each sample, ``[S, B, C, …]`` logits or ``[S, B, …]`` values.
        targets: Classes or class probabilities for the softmax, else one value for each output of a sample.
        link: ``"softmax"``, ``"sigmoid"`` or ``"identity"``.
        noise_std: σ of the identity link; None takes the σ of the lowest NLL.
        reduce: Adds a scalar up over processes that each have a part of the examples.

    Returns:
        NLL in nats per target.

    Raises:
        ShapeError: If targets and outputs do not fit, or there are none.

    Example:
        >>> round(predictive_nll(torch.zeros(3, 2, 10), torch.tensor([0, 1]), "softmax"), 4)
        2.3026
    """
    if outputs.dim() < 2 or len(outputs) == 0 or targets.shape[:1] != outputs.shape[1:2]:
        raise ShapeError(
            f"A predictive NLL needs outputs [samples, examples, …] and targets [examples, …], got "
            f"{list(outputs.shape)} and {list(targets.shape)}."
        )
    if link != "softmax":
        targets = _like(targets, outputs)
    is_class = link == "softmax" and not targets.is_floating_point()
    count = float(reduce(torch.tensor(float(targets.numel() if is_class or link != "softmax" else len(targets)))))
    if count == 0:
        raise ShapeError("A predictive NLL needs at least one target.")
    if link == "identity" and noise_std is None:
        noise_std = fit_noise_std(outputs, targets, reduce)
    density = _DENSITIES[link] if link != "identity" else partial(gaussian_log_density, std=noise_std or 1.0)
    return float(reduce(nll_sum_of(density, outputs, targets))) / count


def nll_sum_of(density: LogDensity, outputs: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of a sampled prediction, summed over targets.

    Args:
        density: Log-density of the targets under every sample.
        outputs: Outputs under each sample, ``[S, B, …]``.
        targets: ``[B, …]``.

    Returns:
        A scalar in nats, in float64.
    """
    samples = len(outputs)
    size = max(1, _BLOCK // max(1, outputs[:, :1].numel()))
    total = torch.zeros((), dtype=torch.float64, device=outputs.device)
    for block, chosen in zip(torch.split(outputs, size, 1), torch.split(targets, size), strict=True):
        total -= (density(block.double(), chosen).logsumexp(0) - math.log(samples)).sum()
    return total


def fit_noise_std(outputs: Tensor, targets: Tensor, reduce: Reduce = lambda total: total) -> float:
    """The standard deviation of Gaussian noise with the lowest NLL of the sampled prediction.

    Args:
        outputs: Means under each sample, ``[S, B, …]``.
        targets: ``[B, …]``.
        reduce: Adds a scalar up over processes.

    Returns:
        σ, from a hundredth of the residuals' root mean square to that itself.

    Example:
        >>> round(fit_noise_std(torch.zeros(1, 2), torch.tensor([3.0, -3.0])), 3)
        3.0
    """
    squares = (outputs - targets).double().square().mean(0)
    total = reduce(torch.stack([squares.sum(), torch.tensor(float(squares.numel()), dtype=squares.dtype)]))
    largest = max(math.sqrt(float(total[0] / total[1])), 1e-12)

    def nll(std: float) -> float:
        return float(reduce(nll_sum_of(partial(gaussian_log_density, std=std), outputs, targets)))

    return minimise_over_logarithm(nll, largest / 100, largest, _NOISE_GRID, _TOLERANCE)


def class_log_density(outputs: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of classes.

    Args:
        outputs: Logits, ``[S, B, C, …]``.
        targets: Classes ``[B, …]``, or probabilities ``[B, C, …]``.

    Returns:
        ``[S, B, …]``.
    """
    joined = outputs.flatten(0, 1)
    wanted = targets.expand(len(outputs), *targets.shape).flatten(0, 1)
    wanted = wanted.to(joined.dtype) if wanted.is_floating_point() else wanted.long()
    return -torch.unflatten(F.cross_entropy(joined, wanted, reduction="none"), 0, outputs.shape[:2])


def bernoulli_log_density(outputs: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of independent binary labels; both ``[…, B, …]``."""
    return -F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype).expand_as(outputs), reduction="none")


def gaussian_log_density(outputs: Tensor, targets: Tensor, std: float) -> Tensor:
    """Log N(y; f, σ²) of every target; outputs ``[S, B, …]``, targets ``[B, …]``."""
    scaled: Tensor = (targets.to(outputs.dtype) - outputs) / std
    return -0.5 * scaled.square() - math.log(std) - 0.5 * math.log(2 * math.pi)


_DENSITIES: dict[Link, LogDensity] = {"softmax": class_log_density, "sigmoid": bernoulli_log_density}


def _like(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets in the shape of one sample's outputs: [B] fits [B, 1]."""
    if targets.numel() != outputs[0].numel():
        raise ShapeError(
            f"Each output needs one target, but outputs are {list(outputs.shape)}, the samples first, and targets "
            f"{list(targets.shape)}."
        )
    return targets.reshape(outputs.shape[1:])
