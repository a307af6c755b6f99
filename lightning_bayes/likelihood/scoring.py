"""The negative log-likelihood of a sampled prediction: each target's density is averaged over samples.

    NLL = -Σ_i log (1/S) Σ_s p(y_i | f_s(x_i))

Sums run in float64, in blocks of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from lightning_bayes.errors import ShapeError
from lightning_bayes.likelihood.base import OutputLikelihood, flattened, num_samples
from lightning_bayes.likelihood.gaussian import Gaussian
from lightning_bayes.likelihood.line_search import minimise_over_logarithm
from lightning_bayes.likelihood.mixtures import grouped
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.private_torch import tree_leaves

Reduce: TypeAlias = Callable[[Tensor], Tensor]  # sums a tensor over processes

BLOCK: Final = 2**22  # outputs per block, in float64
_NOISE_GRID: Final = 15  # grid points for σ, each 1.4 times the one before
_TOLERANCE: Final = 1e-4  # of log σ


def log_densities(kind: OutputLikelihood, outputs: Any, targets: Tensor, counted: Tensor | None = None) -> Tensor:
    """Log p(y | f_s) of each target, ``[S, B, …]``; 0 where `counted`, in the shape of the targets, is False."""
    samples = num_samples(outputs)
    if counted is not None:  # a value that every kind takes instead of an index or nan that none does
        targets = targets.masked_fill(~counted, 0)
    repeated = targets.expand(samples, *targets.shape).flatten(0, 1)
    values = grouped(kind.log_prob(flattened(outputs), repeated), samples)
    return values if counted is None else values.where(counted.reshape(values.shape[1:]), 0.0)


def nll_sum(kind: OutputLikelihood, outputs: Any, targets: Tensor, counted: Tensor | None = None) -> Tensor:
    """Negative log-likelihood summed over targets, in nats and float64; outputs ``[S, B, …]``, targets ``[B, …]``."""
    total = torch.zeros((), dtype=torch.float64, device=targets.device)
    size = _block_size(outputs)
    for start in range(0, len(targets), size):
        block = slice(start, start + size)
        part = mapped(partial(_rows, block=block), outputs)
        densities = log_densities(kind, part, targets[block], None if counted is None else counted[block])
        total = total - (densities.logsumexp(0) - math.log(num_samples(outputs))).sum()
    return total


def _rows(leaf: Tensor, block: slice) -> Tensor:
    return leaf[:, block].double()


def _block_size(outputs: Any) -> int:
    """The number of examples whose outputs under all samples have bounded size."""
    sizes = [leaf[:, :1].numel() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return max(1, BLOCK // max(1, sum(sizes)))


def predictive_nll(
    outputs: Tensor,
    targets: Tensor,
    kind: OutputLikelihood,
    reduce: Reduce = lambda total: total,
    counted: Tensor | None = None,
) -> float:
    """Negative log-likelihood of a sampled prediction in nats per target; a `Gaussian` without σ gets the best one.

    Args:
        outputs: Outputs under each sample, ``[S, B, …]``.
        targets: ``[B, …]``.
        kind: The likelihood.
        reduce: Sums over processes.
        counted: Mask of the targets that count, in their shape; None for all.

    Returns:
        -(1/n) Σ log p(y) over the n targets that count.

    Raises:
        ShapeError: If outputs and targets do not fit, or no target counts.
    """
    if outputs.dim() < 2 or len(outputs) == 0 or targets.shape[:1] != outputs.shape[1:2]:
        raise ShapeError(
            f"A predictive NLL needs outputs [samples, examples, …] and targets [examples, …], got "
            f"{list(outputs.shape)} and {list(targets.shape)}."
        )
    targets = targets.reshape(kind.target_shape(outputs[0], targets))
    has_class_probs = kind.name == "categorical" and targets.is_floating_point()
    number = (len(targets) if has_class_probs else targets.numel()) if counted is None else int(counted.sum())
    count = float(reduce(torch.tensor(float(number))))
    if count == 0:
        raise ShapeError("A predictive NLL needs at least one target.")
    if isinstance(kind, Gaussian) and kind.std is None:
        std = fit_noise_std(outputs, targets, reduce, counted)
        if math.isnan(std):
            return math.nan
        kind = Gaussian(std)
    return float(reduce(nll_sum(kind, outputs, targets, counted))) / count


def fit_noise_std(
    outputs: Tensor, targets: Tensor, reduce: Reduce = lambda total: total, counted: Tensor | None = None
) -> float:
    """Return the noise σ with the lowest NLL, between 1/100 and 1 times the root mean square of the residuals."""
    squares = (outputs - targets).double().square().mean(0)
    squares = squares if counted is None else squares[counted]
    total = reduce(torch.stack([squares.sum(), torch.tensor(float(squares.numel()), dtype=squares.dtype)]))
    mean_square = float(total[0] / total[1])
    if not math.isfinite(mean_square):
        return math.nan
    largest = max(math.sqrt(mean_square), 1e-12)

    def nll(std: float) -> float:
        return float(reduce(nll_sum(Gaussian(std), outputs, targets, counted)))

    return minimise_over_logarithm(nll, largest / 100, largest, _NOISE_GRID, _TOLERANCE)
