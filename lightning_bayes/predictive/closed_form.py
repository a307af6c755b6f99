"""The linearised predictive in closed form: the variance of every output, and the probit approximation.

    f_lin(x, θ) = f(x, μ) + J (θ - μ)  ~  N(f, J Σ Jᵀ)        v_c = (J Σ Jᵀ)_cc

    softmax, sigmoid    p ≈ softmax(κ ∘ f), sigmoid(κ ∘ f)    κ_c = (1 + π v_c / 8)^(-1/2)    MacKay 1992
    identity            N(f, v), as S points with this mean and this variance

v takes one backward for each output. A layer's part of J lies in memory for one output at a time, and only as long as its
block of Σ needs it: where the posterior's blocks are parameters, J is never complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.example_gradients import Contribution, Outer, watched_examples
from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.curvature.output_roots import unit_columns
from lightning_bayes.curvature.selection import only_trained, require_measured
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive.linearized import LinearizedSamples
from lightning_bayes.predictive.links import Link
from lightning_bayes.predictive.samples import PosteriorSamples, Samples, placed, require_tensor

Linearized: TypeAlias = bool | Literal["closed_form"]
_VarianceOf: TypeAlias = Callable[[Tensor], Tensor]


def output_moments(
    model: nn.Module, posterior: AbstractPosterior, forward: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the linearised outputs.

    Args:
        model: The model, in evaluation mode; its own weights do not matter.
        posterior: The posterior of its weights, on its device.
        forward: Computes the model's output, ``[B, …]``; outside of ``torch.inference_mode``.

    Returns:
        f(x, μ) and v, shaped like it.

    Example:
        >>> from lightning_bayes.posteriors import MeanField
        >>> model = nn.Linear(2, 1, bias=False)
        >>> q = MeanField({"weight": torch.zeros(1, 2)}, {"weight": torch.ones(1, 2)}, {"weight": 1.0}, num_data=1)
        >>> output_moments(model, q, lambda: model(torch.tensor([[3.0, 4.0]])))[1]  # xᵀ Σ x
        tensor([[25.]])
    """
    with _along_columns(model, posterior, forward) as (outputs, variance_of):
        variances = [variance_of(column) for column in unit_columns(outputs)]
    return outputs, torch.stack(variances, 1).view_as(outputs)


def output_covariance(
    model: nn.Module, posterior: AbstractPosterior, forward: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the linearised outputs of every example, by C (C + 1)/2 backwards.

    Args:
        model: As in `output_moments`.
        posterior: As in `output_moments`.
        forward: Computes the model's output, ``[B, …]``, with C numbers for each example.

    Returns:
        f(x, μ) as ``[B, C]``, and J Σ Jᵀ, ``[B, C, C]``.

    Example:
        >>> from lightning_bayes.posteriors import MeanField
        >>> model = nn.Linear(1, 2, bias=False)
        >>> precision = {"weight": torch.tensor([[1.0], [0.5]])}
        >>> q = MeanField({"weight": torch.zeros(2, 1)}, precision, {"weight": 1.0}, num_data=1)
        >>> output_covariance(model, q, lambda: model(torch.tensor([[3.0]])))[1]
        tensor([[[ 9.,  0.],
                 [ 0., 18.]]])
    """
    with _along_columns(model, posterior, forward) as (outputs, variance_of):
        covariance = _polarised(list(unit_columns(outputs)), variance_of)
    return outputs.flatten(1) if outputs.dim() > 1 else outputs[:, None], covariance


@contextmanager
def _along_columns(
    model: nn.Module, posterior: AbstractPosterior, forward: Callable[[], Tensor]
) -> Iterator[tuple[Tensor, _VarianceOf]]:
    """The outputs at the posterior mean, and the variance of their sum along a column, ``[B]``."""
    with only_trained(model, posterior.mean) as params, placed(model, posterior.mean):
        blocks = _Blocks(posterior, {param: name for name, param in params.items()})
        engine = FusedEngine(model, "sum")
        with watched_examples(engine, blocks.receive) as captured:
            outputs = require_tensor(model, forward())
            require_measured(engine, captured, outputs, params)

            def variance_of(column: Tensor) -> Tensor:
                captured.backward(outputs, column)
                return blocks.variance()

            yield outputs.detach(), variance_of


def _polarised(columns: list[Tensor], variance_of: _VarianceOf) -> Tensor:
    """Covariances from variances: cov(a, b) = (var(a + b) - var(a) - var(b)) / 2."""
    variances = [variance_of(column) for column in columns]
    covariance = torch.diag_embed(torch.stack(variances, 1))
    for i, j in combinations(range(len(columns)), 2):
        both = (variance_of(columns[i] + columns[j]) - variances[i] - variances[j]) / 2
        covariance[:, i, j] = covariance[:, j, i] = both
    return covariance


class _Blocks:
    """Collects the contributions of one column until a block of the posterior has all of its weights."""

    def __init__(self, posterior: AbstractPosterior, names: dict[nn.Parameter, str]) -> None:
        self.posterior, self.names = posterior, names
        self.block_of = {name: block for block in posterior.blocks() for name in block}
        self.waiting: dict[str, Tensor] = {}
        self.terms: list[Tensor] = []

    def receive(self, param: nn.Parameter, contribution: Contribution) -> None:
        """Take c_i of a parameter."""
        name = self.names[param]
        block = self.block_of[name]
        if isinstance(contribution, Outer) and len(block) == 1:
            self.terms.append(self.posterior.variance_along_outer(name, *contribution))
            return
        self.waiting[name] = contribution.dense() if isinstance(contribution, Outer) else contribution
        if all(other in self.waiting for other in block):
            self.terms.append(self.posterior.variance_along({other: self.waiting.pop(other) for other in block}))

    def variance(self) -> Tensor:
        """dᵀ Σ d of the finished column, ``[B]``. Weights that it does not reach have d = 0."""
        for block in {id(self.block_of[name]): self.block_of[name] for name in self.waiting}.values():
            known = {name: self.waiting.pop(name) for name in block if name in self.waiting}
            size = len(next(iter(known.values())))
            zeros = {n: self.posterior.mean[n].new_zeros(size, *self.posterior.mean[n].shape) for n in block}
            self.terms.append(self.posterior.variance_along({**zeros, **known}))
        total = torch.stack(self.terms).sum(0)
        self.terms.clear()
        return total


def probit(outputs: Tensor, variance: Tensor) -> Tensor:
    """κ ∘ f: logits whose softmax or sigmoid approximates the average over N(f, v).

    Args:
        outputs: f.
        variance: v, of the same shape.

    Returns:
        Logits, shaped alike.

    Example:
        >>> probit(torch.tensor([3.0]), torch.tensor([8 * 3 / torch.pi]))
        tensor([1.5000])
    """
    return outputs / (1 + math.pi / 8 * variance).sqrt()


def spread_points(count: int) -> Tensor:
    """S equally likely points with mean 0 and variance 1, at quantiles of the normal distribution.

    Args:
        count: S; for 1 it is the mean alone.

    Returns:
        ``[S]``, in float64.
    """
    if count == 1:
        return torch.zeros(1, dtype=torch.float64)
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    points = torch.special.ndtri(quantiles)
    scaled: Tensor = points / points.square().mean().sqrt()
    return scaled


@final
class ClosedFormSamples(Samples):
    """The linearised predictive in closed form, in the place of samples.

    For logits it is one sample, whose softmax or sigmoid is the prediction: the mutual information is 0. For the identity
    link there are S points.

    Args:
        samples: The number of samples of the posterior; S counts for the identity link only.
        link: How outputs become predictions.
    """

    def __init__(self, samples: PosteriorSamples, link: Link) -> None:
        self.samples, self.link = samples, link
        self.count = samples.count if link == "identity" else 1

    def chosen(self, model: nn.Module, forward: Callable[[], Tensor], indices: Iterable[int]) -> Tensor:
        """Compute mean and variance once; see `Samples.chosen`."""
        outputs, variance = output_moments(model, self.samples.posterior, forward)
        if self.link != "identity":
            return probit(outputs, variance)[None]
        points = spread_points(self.count)[list(indices)].to(outputs)
        return outputs + points.view(-1, *[1] * outputs.dim()) * variance.sqrt()

    def scaled(self, scale: float) -> ClosedFormSamples:
        """The same at another width of the posterior."""
        posterior = ScaledPosterior(self.samples.posterior, scale)
        return ClosedFormSamples(PosteriorSamples(posterior, self.samples.count, self.samples.seed), self.link)


def seen_through(samples: PosteriorSamples, linearized: Linearized, link: Link) -> Samples:
    """Weight samples as a predictive sees them.

    Args:
        samples: The weight samples.
        linearized: False for the networks that they are, True for the model's first-order expansion, ``"closed_form"`` for
            the expansion without samples.
        link: How outputs become predictions.

    Returns:
        The samples of the predictive.

    Raises:
        HyperparameterError: If `linearized` is none of these.
    """
    if linearized not in {False, True, "closed_form"}:
        raise HyperparameterError(f"linearized={linearized!r} is unknown; use False, True or 'closed_form'.")
    if linearized == "closed_form":
        return ClosedFormSamples(samples, link)
    return LinearizedSamples(samples) if linearized else samples
