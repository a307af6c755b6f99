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
from lightning_bayes.likelihood.base import OutputLikelihood
from lightning_bayes.likelihood.gaussian import Gaussian
from lightning_bayes.likelihood.line_search import minimise_over_logarithm
from lightning_bayes.likelihood.names import LinkArgument, find_kind
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.private_torch import tree_leaves

Reduce: TypeAlias = Callable[[Tensor], Tensor]  # sums a tensor over processes

BLOCK: Final = 2**22  # outputs per block, in float64
_NOISE_GRID: Final = 15  # grid points for σ, each 1.4 times the one before
_TOLERANCE: Final = 1e-4  # of log σ


def target_nlls(
    kind: OutputLikelihood, outputs: Any, targets: Tensor, counted: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """Negative log-likelihood of each target, in nats and float64; 0 where `counted`, in their shape, is False.

    Args:
        kind: The likelihood.
        outputs: Outputs under each sample, ``[S, B, …]``.
        targets: ``[B, …]``.
        counted: Mask of the targets that count; None for all.
        temperature: Divides the outputs.

    Returns:
        ``[B, …]``, without the dimension of the classes.
    """
    if counted is not None:  # a value that every kind takes instead of an index or nan that none does
        targets = targets.masked_fill(~counted, 0)
    size, found = _block_size(outputs), []
    for start in range(0, len(targets), size):
        block = slice(start, start + size)
        part = mapped(partial(_rows, block=block, temperature=temperature), outputs)
        values = -kind.log_predictive(part, targets[block])
        found.append(values if counted is None else values.where(shaped_mask(kind, counted[block], values), 0.0))
    return torch.cat(found) if found else targets.new_zeros(0, dtype=torch.float64)


def shaped_mask(kind: OutputLikelihood, counted: Tensor, values: Tensor) -> Tensor:
    """A mask of targets in the shape of their log-probabilities, which have no dimension for the classes."""
    if counted.numel() != values.numel():  # of probabilities as targets
        counted = counted.all(kind.classes)  # type: ignore[attr-defined]
    return counted.reshape(values.shape)


def _rows(leaf: Tensor, block: slice, temperature: float) -> Tensor:
    return leaf[:, block].double() / temperature


def _block_size(outputs: Any) -> int:
    """The number of examples whose outputs under all samples have bounded size."""
    sizes = [leaf[:, :1].numel() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return max(1, BLOCK // max(1, sum(sizes)))


def predictive_nll(
    outputs: Tensor,
    targets: Tensor,
    likelihood: LinkArgument,
    reduce: Reduce = lambda total: total,
    counted: Tensor | None = None,
) -> float:
    """Negative log-likelihood of a sampled prediction in nats per target; a `Gaussian` without σ gets the best one.

    Args:
        outputs: Outputs under each sample, ``[S, B, …]``.
        targets: ``[B, …]``.
        likelihood: The kind or its name, as in `lightning_bayes.mc_predict`; ``Gaussian(std)`` states the noise.
        reduce: Sums over processes.
        counted: Mask of the targets that count, in their shape; None for all.

    Returns:
        -(1/n) Σ log p(y) over the n targets that count.

    Raises:
        ShapeError: If outputs and targets do not fit, or no target counts.
    """
    kind = find_kind(likelihood)
    if outputs.dim() < 2 or len(outputs) == 0 or targets.shape[:1] != outputs.shape[1:2]:
        raise ShapeError(
            f"A predictive NLL needs outputs [samples, examples, …] and targets [examples, …], got "
            f"{list(outputs.shape)} and {list(targets.shape)}."
        )
    targets = targets.reshape(kind.target_shape(outputs[0], targets))
    noisy = with_noise(kind, outputs, targets, reduce, counted)
    if noisy is None:
        return math.nan
    nlls = target_nlls(noisy, outputs, targets, counted)
    number = nlls.numel() if counted is None else int(shaped_mask(kind, counted, nlls).sum())
    total, count = reduce(torch.stack([nlls.sum(), nlls.new_tensor(float(number))])).tolist()
    if count == 0:
        raise ShapeError("A predictive NLL needs at least one target.")
    return float(total / count)


def with_noise(
    kind: OutputLikelihood,
    outputs: Any,
    targets: Tensor,
    reduce: Reduce = lambda total: total,
    counted: Tensor | None = None,
) -> OutputLikelihood | None:
    """A `Gaussian` without σ with the best one for these targets, None if no σ fits; other kinds as they are."""
    if not isinstance(kind, Gaussian) or kind.has_noise:
        return kind
    std = fit_noise_std(outputs, targets, reduce, counted)
    return None if math.isnan(std) else Gaussian(std)


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
        return float(reduce(target_nlls(Gaussian(std), outputs, targets, counted).sum()))

    return minimise_over_logarithm(nll, largest / 100, largest, _NOISE_GRID, _TOLERANCE)
