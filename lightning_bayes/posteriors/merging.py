"""Combine posteriors that were trained on different data under one prior.

    p(θ | D₁ … D_n) ∝ Π_i p(θ | D_i) / p(θ)^(n-1)      P = Σ_i P_i - (n - 1) δ      P μ = Σ_i P_i μ_i - (n - 1) δ μ₀

This is the product of the Gaussian posteriors with the prior counted once. It is exact if the posteriors are. Networks
must start from the same weights, so that their posteriors share a mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_bayes.errors import PosteriorError
from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict
from lightning_bayes.posteriors.full_gaussian import FullGaussian, flattened, split_like
from lightning_bayes.posteriors.mean_field import MeanField


def merge(posteriors: Sequence[MeanField | FullGaussian]) -> MeanField | FullGaussian:
    """Combine posteriors of the same weights from different data.

    Raises `PosteriorError` if families, weights or priors differ, or if the product is not a density because a posterior is
    wider than its prior.

    Args:
        posteriors: At least one, all `MeanField` or all `FullGaussian`, with the same weights and the same prior.

    Returns:
        A posterior of the same family for all data. Constants such as BatchNorm statistics are averaged, weighted by the
        number of examples.
    """
    _check(posteriors)
    first = posteriors[0]
    num_data = sum(posterior.num_data for posterior in posteriors)
    constants = {
        name: _average([p.constants[name] for p in posteriors], [p.num_data / num_data for p in posteriors])
        for name in first.constants
    }
    if isinstance(first, MeanField):
        return _mean_field([q for q in posteriors if isinstance(q, MeanField)], num_data, constants)
    return _full([q for q in posteriors if isinstance(q, FullGaussian)], num_data, constants)


def _mean_field(posteriors: list[MeanField], num_data: float, constants: TensorDict) -> MeanField:
    first, extra_priors = posteriors[0], len(posteriors) - 1
    precision, mean = {}, {}
    for name, delta in first.prior_precision.items():
        centre = first.prior_mean.get(name, torch.zeros_like(first.mean[name]))
        precision[name] = torch.stack([q.precision[name] for q in posteriors]).sum(0) - extra_priors * delta
        _require_positive(name, precision[name])
        weighted = torch.stack([q.precision[name] * q.mean[name] for q in posteriors]).sum(0)
        mean[name] = (weighted - extra_priors * delta * centre) / precision[name]
    return MeanField(mean, precision, first.prior_precision, num_data, constants, first.prior_mean)


def _full(posteriors: list[FullGaussian], num_data: float, constants: TensorDict) -> FullGaussian:
    first, extra_priors = posteriors[0], len(posteriors) - 1
    deltas = {name: torch.full_like(mean, first.prior_precision[name]) for name, mean in first.mean.items()}
    delta = flattened(deltas, first.mean)
    precision = torch.stack([q.precision for q in posteriors]).sum(0) - extra_priors * delta.diag()
    _require_positive(", ".join(first.mean), torch.linalg.eigvalsh(precision))
    weighted = torch.stack([q.precision @ flattened(q.mean, first.mean) for q in posteriors]).sum(0)
    mean = split_like(torch.linalg.solve(precision, weighted), first.mean)
    return FullGaussian(mean, precision, first.prior_precision, num_data, constants)


def _average(values: list[Tensor], weights: list[float]) -> Tensor:
    if not values[0].is_floating_point() or all(torch.equal(value, values[0]) for value in values):
        return values[0]
    return torch.stack([weight * value for value, weight in zip(values, weights, strict=True)]).sum(0)


def _require_positive(names: str, precision: Tensor) -> None:
    if not bool((precision > 0).all()):
        raise PosteriorError(
            f"The merged precision of {names} is not positive (its smallest value is {float(precision.min()):.3g}): one "
            "posterior is wider than its prior, which tempering can cause. Merge posteriors trained with an explicit lr."
        )


def _check(posteriors: Sequence[AbstractPosterior]) -> None:
    families = sorted({type(posterior).__name__ for posterior in posteriors})
    if len(families) != 1 or families[0] not in {"MeanField", "FullGaussian"}:
        raise PosteriorError(
            f"merge got {', '.join(families) or 'no posterior'}; pass at least one, all MeanField or all FullGaussian."
        )
    first = posteriors[0]
    for index, other in enumerate(posteriors):
        shapes = [{name: mean.shape for name, mean in q.mean.items()} for q in (first, other)]
        is_reordered = isinstance(first, FullGaussian) and list(first.mean) != list(other.mean)
        if shapes[0] != shapes[1] or first.constants.keys() != other.constants.keys() or is_reordered:
            raise PosteriorError(
                f"The weights of posterior {index}, or their order, differ from posterior 0. Merge posteriors of one "
                "model."
            )
        has_same_precision = _all_equal(first.prior_precision, other.prior_precision)
        if not (has_same_precision and _all_equal(first.prior_mean, other.prior_mean)):
            raise PosteriorError(
                f"The prior of posterior {index} differs from posterior 0. Train all posteriors with the same prior."
            )


def _all_equal(first: Mapping[str, float | Tensor], other: Mapping[str, float | Tensor]) -> bool:
    return first.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])) for name, value in first.items()
    )
