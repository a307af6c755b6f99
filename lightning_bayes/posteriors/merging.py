"""One posterior from several that were trained on different data under one prior.

    p(θ | D₁ … D_n) ∝ Π_i p(θ | D_i) / p(θ)^(n-1)      P = Σ_i P_i - (n - 1) δ      P μ = Σ_i P_i μ_i - (n - 1) δ μ₀

The product of Gaussian posteriors, with the prior counted once: exact where the posteriors are. Networks have to
start from the same weights, so that their posteriors lie around one mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_bayes.errors import PosteriorError
from lightning_bayes.posteriors.base import AbstractPosterior, TensorDict
from lightning_bayes.posteriors.full_gaussian import FullGaussian
from lightning_bayes.posteriors.mean_field import MeanField


def merge(posteriors: Sequence[MeanField | FullGaussian]) -> MeanField | FullGaussian:
    """Combine posteriors of the same weights that have seen different data.

    Args:
        posteriors: At least one, all `MeanField` or all `FullGaussian`, with the same weights and the same prior.

    Returns:
        A posterior of the family, which has seen the data of all. Constants such as BatchNorm statistics are averages,
        weighted by the number of examples. Other families, weights or priors than the first one's are a `PosteriorError`; so
        is a product that is not a density, because a posterior is wider than its prior.

    Example:
        >>> one = MeanField({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}, {"w": 1.0}, num_data=10)
        >>> two = MeanField({"w": torch.tensor([0.0])}, {"w": torch.tensor([3.0])}, {"w": 1.0}, num_data=20)
        >>> both = merge([one, two])
        >>> both.precision["w"], both.mean["w"], both.num_data
        (tensor([4.]), tensor([0.5000]), 30)
    """
    _check(posteriors)
    first = posteriors[0]
    num_data = sum(posterior.num_data for posterior in posteriors)
    constants = {
        name: _average([p.constants[name] for p in posteriors], [p.num_data / num_data for p in posteriors])
        for name in first.constants
    }
    if isinstance(first, MeanField):
        fields = [posterior for posterior in posteriors if isinstance(posterior, MeanField)]
        return _mean_field(fields, num_data, constants)
    return _full([posterior for posterior in posteriors if isinstance(posterior, FullGaussian)], num_data, constants)


def _mean_field(posteriors: list[MeanField], num_data: float, constants: TensorDict) -> MeanField:
    first, more = posteriors[0], len(posteriors) - 1
    precision, mean = {}, {}
    for name, delta in first.prior_precision.items():
        centre = first.prior_mean.get(name, torch.zeros_like(first.mean[name]))
        precision[name] = torch.stack([q.precision[name] for q in posteriors]).sum(0) - more * delta
        _require_positive(name, precision[name])
        weighted = torch.stack([q.precision[name] * q.mean[name] for q in posteriors]).sum(0)
        mean[name] = (weighted - more * delta * centre) / precision[name]
    return MeanField(mean, precision, first.prior_precision, num_data, constants, first.prior_mean)


def _full(posteriors: list[FullGaussian], num_data: float, constants: TensorDict) -> FullGaussian:
    first, more = posteriors[0], len(posteriors) - 1
    delta = torch.cat(
        [torch.full_like(mean.flatten(), first.prior_precision[name]) for name, mean in first.mean.items()]
    )
    precision = torch.stack([q.precision for q in posteriors]).sum(0) - more * delta.diag()
    _require_positive(", ".join(first.mean), torch.linalg.eigvalsh(precision))
    weighted = torch.stack([q.precision @ _joined(q.mean) for q in posteriors]).sum(0)
    flat = torch.linalg.solve(precision, weighted)
    parts = torch.split(flat, [mean.numel() for mean in first.mean.values()])
    mean = {name: part.view_as(first.mean[name]) for name, part in zip(first.mean, parts, strict=True)}
    return FullGaussian(mean, precision, first.prior_precision, num_data, constants)


def _joined(mean: TensorDict) -> Tensor:
    return torch.cat([value.flatten() for value in mean.values()])


def _average(values: list[Tensor], shares: list[float]) -> Tensor:
    if not values[0].is_floating_point() or all(torch.equal(value, values[0]) for value in values):
        return values[0]
    return torch.stack([share * value for value, share in zip(values, shares, strict=True)]).sum(0)


def _require_positive(names: str, precision: Tensor) -> None:
    if not bool((precision > 0).all()):
        raise PosteriorError(
            f"The merged precision of {names} is not positive (its smallest value is "
            f"{float(precision.min()):.3g}): a posterior is wider than its prior, as a tempered one can be. Merge those "
            "of the step that an explicit lr gives."
        )


def _check(posteriors: Sequence[AbstractPosterior]) -> None:
    families = sorted({type(posterior).__name__ for posterior in posteriors})
    if len(families) != 1 or families[0] not in {"MeanField", "FullGaussian"}:
        raise PosteriorError(
            f"merge got {', '.join(families) or 'no posterior'}; give at least one, all MeanField or all FullGaussian."
        )
    first = posteriors[0]
    for number, other in enumerate(posteriors):
        shapes = [{name: mean.shape for name, mean in q.mean.items()} for q in (first, other)]
        if shapes[0] != shapes[1] or first.constants.keys() != other.constants.keys():
            raise PosteriorError(
                f"Posterior {number} has other weights than the first one. Merge posteriors of one model."
            )
        if not (_same(first.prior_precision, other.prior_precision) and _same(first.prior_mean, other.prior_mean)):
            raise PosteriorError(
                f"Posterior {number} has another prior than the first one, which is counted once. Train all under one prior."
            )


def _same(first: Mapping[str, float | Tensor], other: Mapping[str, float | Tensor]) -> bool:
    return first.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])) for name, value in first.items()
    )
