"""The linearised predictive in closed form: output variances and the probit approximation.

    f_lin(x, θ) = f(x, μ) + J (θ - μ)  ~  N(f, J Σ Jᵀ)        v_c = (J Σ Jᵀ)_cc

    classes        p ≈ softmax(κ ∘ f)    κ_c = (1 + π v_c / 8)^(-1/2)    MacKay 1992
    other kinds    N(f, v) of each output, represented by S values with this mean and variance

Computing v takes one backward pass per output. Each layer's part of J is stored for one output at a time, until its
block of Σ is complete. If every parameter is a separate block, the full J is never in memory.

`probit_samples` are logits whose average is the probit approximation, so that its prediction has a mutual information too:

    z_s = f + b + √v ∘ ε_s        b such that  mean_s softmax(z_s) = p,  the prediction

b is found by b ← b + log p - log mean_s softmax(z_s), which scales the columns of a positive matrix whose rows softmax
normalises (Sinkhorn 1967, https://doi.org/10.2307/2314570). As in the probit approximation, outputs are independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.example_gradients import Contribution, dense, watched_examples
from lightning_bayes.curvature.factors import LayerRows
from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.curvature.output_roots import unit_columns
from lightning_bayes.curvature.selection import only_trained, require_measured
from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.likelihood import Categorical, LinkArgument, find_kind
from lightning_bayes.posteriors import AbstractPosterior
from lightning_bayes.predictive.linearized import LinearizedSamples
from lightning_bayes.predictive.samples import PosteriorSamples, Samples, require_tensor
from lightning_bayes.predictive.weights import temporary_weights

Linearized: TypeAlias = bool | Literal["closed_form"]
Column: TypeAlias = list[tuple[nn.Parameter, Contribution]]  # the derivatives of one output


def output_moments(
    model: nn.Module, posterior: AbstractPosterior, forward: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """f(x, μ) and v, of the shape of the output of `forward`, which must not run under ``torch.inference_mode``."""
    return BatchMoments(FusedEngine(model, "sum"), forward).under(posterior)


@final
class BatchMoments:
    """The moments of one batch under posteriors that share their mean; derivatives are stored while `room` lasts.

    An engine, with the loss reduction ``"sum"``, checks its rules once for all batches.
    """

    def __init__(self, engine: FusedEngine, forward: Callable[[], Tensor], room: Room | None = None) -> None:
        self.engine, self.forward, self.room = engine, forward, room or Room(-1)
        self._stored: tuple[Tensor, list[Column]] | None = None  # outputs, and the derivatives of each

    def under(self, posterior: AbstractPosterior) -> tuple[Tensor, Tensor]:
        """f(x, μ) and v; see `output_moments`."""
        model = self.engine.model
        with only_trained(model, posterior.mean) as params:
            blocks = _Blocks(posterior, {param: name for name, param in params.items()})
            if self._stored is None:
                with temporary_weights(model, posterior.mean):
                    outputs, variances = self._measured(blocks, params)
            else:
                outputs, columns = self._stored
                variances = [blocks.variance_of(column) for column in columns]
        return outputs, torch.stack(variances, 1).view_as(outputs)

    def _measured(self, blocks: _Blocks, params: dict[str, nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
        variances, columns = [], list[Column]()

        def receive(param: nn.Parameter, contribution: Contribution) -> None:
            blocks.receive(param, contribution)
            if not self.room.is_full and self.room.takes(contribution):
                columns[-1].append((param, contribution))

        with watched_examples(self.engine, receive) as captured:
            outputs = require_tensor(self.engine.model, self.forward())
            require_measured(self.engine, captured, outputs, params)
            for gradient in unit_columns(outputs):
                columns.append([])
                captured.backward(outputs, gradient)
                variances.append(blocks.variance())
        if not self.room.is_full:
            self._stored = outputs.detach(), columns
        return outputs.detach(), variances


@dataclass
class Room:
    """How many elements of derivatives may still be stored; the first that do not fit end it."""

    elements: int
    storages: set[int] = field(default_factory=set)

    def takes(self, contribution: Contribution) -> bool:
        """Whether to store a contribution; all columns of a linear layer share its inputs."""
        for tensor in contribution if isinstance(contribution, LayerRows) else (contribution,):
            storage = tensor.untyped_storage().data_ptr()
            self.elements -= 0 if storage in self.storages else tensor.numel()
            self.storages.add(storage)
        return not self.is_full

    @property
    def is_full(self) -> bool:
        """Whether something did not fit."""
        return self.elements < 0


class _Blocks:
    """Sums dᵀ Σ d over the posterior's blocks, for the derivative d of one column. A block is added once d covers it."""

    def __init__(self, posterior: AbstractPosterior, names: dict[nn.Parameter, str]) -> None:
        self.posterior, self.names = posterior, names
        self.block_of = {name: block for block in posterior.blocks() for name in block}
        self.pending: dict[str, Tensor] = {}  # derivatives of blocks that are not complete yet
        self.terms: list[Tensor] = []

    def receive(self, param: nn.Parameter, contribution: Contribution) -> None:
        """Add the derivative with respect to one parameter."""
        name = self.names[param]
        block = self.block_of[name]
        if isinstance(contribution, LayerRows) and len(block) == 1:
            self.terms.append(self.posterior.variance_along_rows(name, contribution.gradients, contribution.inputs))
            return
        self.pending[name] = dense(param, contribution)
        if all(other in self.pending for other in block):
            self._add(block)

    def variance_of(self, column: Column) -> Tensor:
        """Return dᵀ Σ d of a stored column."""
        for param, contribution in column:
            self.receive(param, contribution)
        return self.variance()

    def variance(self) -> Tensor:
        """Return dᵀ Σ d of the finished column, ``[B]``. Weights that the column does not reach have d = 0."""
        while self.pending:
            self._add(self.block_of[next(iter(self.pending))])
        total = torch.stack(self.terms).sum(0)
        self.terms.clear()
        return total

    def _add(self, block: Iterable[str]) -> None:
        reached = {name: self.pending.pop(name) for name in block if name in self.pending}
        batch_size = len(next(iter(reached.values())))

        def derivative(name: str) -> Tensor:
            mean = self.posterior.mean[name]
            return reached[name] if name in reached else mean.new_zeros(batch_size, *mean.shape)

        self.terms.append(self.posterior.variance_along({name: derivative(name) for name in block}))


def probit(outputs: Tensor, variance: Tensor) -> Tensor:
    """Logits κ ∘ f, whose softmax or sigmoid approximates the average over N(f, v)."""
    return outputs / (1 + math.pi / 8 * variance).sqrt()


def spread_points(count: int) -> Tensor:
    """Quantiles of the normal distribution, rescaled to mean 0 and variance 1: ``[count]``, in float64; 0 for one."""
    if count == 1:
        return torch.zeros(1, dtype=torch.float64)
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    points: Tensor = torch.special.ndtri(quantiles)
    return points / points.square().mean().sqrt()


@final
class ClosedFormSamples(Samples):
    """The linearised predictive in closed form: S samples with the probit's mean probability, or the outputs' moments."""

    def __init__(self, samples: PosteriorSamples, link: LinkArgument) -> None:
        self.samples, self.kind = samples, find_kind(link)
        self.count = samples.count
        self._engine: FusedEngine | None = None  # of the model of the last call, whose rules it has checked
        self._is_nested = False  # whether outputs are several tensors

    def subset_outputs(self, model: nn.Module, forward: Callable[[], Any], indices: Iterable[int]) -> Any:
        """Compute outputs from one mean and variance."""
        # The variance has no derivative, and is that of one tensor: average linearised networks instead.
        if torch.is_grad_enabled() or self._is_nested:
            return LinearizedSamples(self.samples).subset_outputs(model, forward, indices)
        if self._engine is None or self._engine.model is not model:
            with only_trained(model, self.samples.posterior.mean):  # other layers need no rule
                self._engine = FusedEngine(model, "sum")
        try:
            outputs, variance = BatchMoments(self._engine, self._noting(forward)).under(self.samples.posterior)
        except ShapeError:
            if not self._is_nested:
                raise
            return self.subset_outputs(model, forward, indices)
        if isinstance(self.kind, Categorical) and self.kind.is_logits:
            prediction, dim = probit(outputs, variance), self.kind.classes
            drawn = probit_samples(outputs, variance, prediction, self.count, dim, self.samples.seed)
            return drawn[list(indices)]
        points = spread_points(self.count)[list(indices)].to(outputs)
        return outputs + points.view(-1, *[1] * outputs.dim()) * variance.sqrt()

    def _noting(self, forward: Callable[[], Any]) -> Callable[[], Any]:
        """The same function, which notes whether it returns several tensors."""

        def noted() -> Any:
            output = forward()
            self._is_nested = not isinstance(output, Tensor)
            return output

        return noted

    def scaled(self, scale: float) -> ClosedFormSamples:
        """The same predictive with the posterior's standard deviations multiplied by `scale`."""
        return ClosedFormSamples(self.samples.scaled(scale), self.kind)


def predictive_samples(samples: PosteriorSamples, linearized: Linearized, link: LinkArgument) -> Samples:
    """The output samples of a predictive; `linearized` as in `mc_predict`."""
    if linearized not in {False, True, "closed_form"}:
        raise HyperparameterError(f"linearized={linearized!r} is unknown; use False, True or 'closed_form'.")
    if linearized == "closed_form":
        return ClosedFormSamples(samples, link)
    return LinearizedSamples(samples) if linearized else samples


_ITERATIONS: Final = 100  # a variance of 100 leaves errors of 1e-3
_TOLERANCE: Final = 1e-6  # of probabilities


def probit_samples(
    outputs: Tensor, variance: Tensor, prediction: Tensor, count: int, dim: int, seed: int = 0
) -> Tensor:
    """S logits ``[S, batch, …]`` of N(f + b, v) whose mean probability is that of `prediction`; classes in `dim`."""
    if count == 1:
        return prediction[None]
    deviations = _deviations(count, outputs.shape[1:], seed).to(outputs.device) * variance.double().sqrt()
    centre, target = outputs.double(), prediction.double().log_softmax(dim)
    for _ in range(_ITERATIONS):
        found = (centre + deviations).log_softmax(dim if dim < 0 else dim + 1).logsumexp(0) - math.log(count)
        centre = centre + target - found
        if float((found.exp() - target.exp()).abs().max()) < _TOLERANCE:
            break
    return (centre + deviations).to(outputs.dtype)


def _deviations(count: int, shape: torch.Size, seed: int) -> Tensor:
    """Normal values ``[S, 1, …]`` with mean 0 and mean square 1 over samples."""
    values = torch.randn(count, 1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    values = values - values.mean(0)
    return values / values.square().mean(0).sqrt()
