"""Samples of a model, such as weights drawn from a posterior, and context managers that load them into the model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.parameters import buffers_kept
from lightning_bayes.errors import HyperparameterError, PosteriorError, ShapeError
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive.nested import stacked
from lightning_bayes.predictive.weights import graph_kept, temporary_weights
from lightning_bayes.private_torch import outside_functorch

CACHED_ELEMENTS = 2**28  # 1 GiB of float32, ten samples of a ResNet-50; smaller sets are drawn once


class Samples(ABC):
    """S samples of a model's outputs.

    Attributes:
        count: S.
        has_mean: Whether the samples have a mean that the model itself represents.
        fixed: Whether a sample is the same function for every batch.
    """

    count: int
    has_mean: bool = True
    fixed: bool = True

    @abstractmethod
    def subset_outputs(self, model: nn.Module, forward: Callable[[], Any], indices: Iterable[int]) -> Any:
        """Outputs of `forward`, which uses `model`, under the samples `indices`, stacked in their order; see `nested`."""

    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Context in which layers that are called outside of `forward` are those of a sample; by default unchanged."""
        return nullcontext()

    def at_mean(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which `model` is the mean of the samples; by default the model as it is."""
        return nullcontext()

    def outputs(self, model: nn.Module, forward: Callable[[], Any]) -> Any:
        """Run `forward` under every sample; returns the outputs ``[S, …]``. See also `subset_outputs`."""
        return self.subset_outputs(model, forward, range(self.count))


class NetworkSamples(Samples):
    """Samples that are networks, such as a model with sampled weights."""

    @abstractmethod
    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Context in which `model` is sample `index`. The model is restored on exit, also after an exception."""

    def subset_outputs(self, model: nn.Module, forward: Callable[[], Any], indices: Iterable[int]) -> Any:
        """Run `forward` under a subset of the samples, one sample at a time."""
        outputs = []
        for index in indices:
            with self.sampled(model, index), graph_kept(model):
                outputs.append(forward())
        return stacked(outputs)


def require_tensor(model: nn.Module, output: object) -> Tensor:
    """Return `output` if it is a tensor; otherwise raise a `ShapeError`."""
    if not isinstance(output, Tensor):
        raise ShapeError(
            f"{type(model).__name__} returned a {type(output).__name__}, which cannot be averaged over samples. Return one "
            "tensor: logits or means."
        )
    return output


class PosteriorSamples(NetworkSamples):
    """S weight samples of a Gaussian posterior, the same for every batch, whose average is exactly the posterior mean.

        θ_s = μ + √(S / (S-1)) (θ'_s - θ̄')        θ'_1, …, θ'_S ~ q independent, θ̄' their average

    Every θ_s has the distribution q, so Monte-Carlo averages stay unbiased. Terms linear in θ - μ cancel in them, and these
    are most of their error under a narrow posterior. This is moment matching (Boyle, Broadie & Glasserman 1997,
    https://doi.org/10.1016/S0165-1889(97)00028-6). A single sample is drawn as it is.

    Args:
        posterior: The posterior to sample.
        count: S.
        seed: Seed of the samples. The global random number generator is not used.

    Raises:
        HyperparameterError: If S is below 1.
    """

    def __init__(self, posterior: AbstractPosterior, count: int, seed: int = 0) -> None:
        if count < 1:
            raise HyperparameterError(f"samples={count} must be at least 1.")
        self.posterior, self.count, self.seed = posterior, count, seed
        size = sum(mean.numel() for mean in posterior.mean.values())
        self._is_cached = size * count <= CACHED_ELEMENTS
        self._cache: list[dict[str, Tensor]] = []
        self._average: dict[str, Tensor] | None = None  # θ̄'

    def scaled(self, scale: float) -> PosteriorSamples:
        """The same samples with standard deviations multiplied by `scale`; at 0 a single sample remains, the mean."""
        return PosteriorSamples(ScaledPosterior(self.posterior, scale), self.count if scale else 1, self.seed)

    def weights(self, index: int) -> dict[str, Tensor]:
        """θ_s for s = `index`, by parameter name."""
        # Neither a user's torch.func transform nor torch.inference_mode may mark weights that later calls use.
        with outside_functorch(), torch.inference_mode(False), torch.no_grad():
            if not self._is_cached:
                return self._matched(self._draw(index))
            if not self._cache:
                draws = [self._draw(s) for s in range(self.count)]
                self._average = _average_of(draws, self.count)
                self._cache = [self._matched(draw) for draw in draws]
            return self._cache[index]

    def _draw(self, index: int) -> dict[str, Tensor]:
        """θ'_s."""
        device = next(iter(self.posterior.mean.values())).device
        return self.posterior.sample(torch.Generator(device).manual_seed(sample_seed(self.seed, index)))

    def _matched(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        """θ_s from θ'_s."""
        if self.count == 1:
            return draw
        if self._average is None:
            self._average = _average_of((self._draw(s) for s in range(self.count)), self.count)
        factor = math.sqrt(self.count / (self.count - 1))
        mean = self.posterior.mean
        return {name: mean[name] + factor * (value - self._average[name]) for name, value in draw.items()}

    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Context in which `model` has the weights of sample `index`."""
        return temporary_weights(model, self.tensors(index))

    def tensors(self, index: int) -> dict[str, Tensor]:
        """θ_s, and the statistics that go with it."""
        weights = self.weights(index)
        with outside_functorch():
            return {**weights, **self.posterior.statistics(weights)}


def _average_of(draws: Iterable[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for draw in draws:  # a generator keeps one draw in memory at a time
        for name, value in draw.items():
            total[name] = total[name] + value if name in total else value
    return {name: value / count for name, value in total.items()}


@final
class MemberSamples(NetworkSamples):
    """M networks of one architecture, trained independently: the parameters and buffers of each, by name.

    They are deep ensembles (Lakshminarayanan et al. 2017, https://arxiv.org/abs/1612.01474).
    """

    has_mean = False

    def __init__(self, members: Sequence[dict[str, Tensor]]) -> None:
        self.members, self.count = list(members), len(members)

    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Context in which `model` is member `index`."""
        return temporary_weights(model, self.members[index])


@final
class MemberPosteriors(NetworkSamples):
    """S networks from each of M posteriors around independently trained networks, as in Multi-SWAG."""

    has_mean = False

    def __init__(self, posteriors: Sequence[AbstractPosterior], count: int, seed: int = 0) -> None:
        self.members = [PosteriorSamples(q, count, seed + member) for member, q in enumerate(posteriors)]
        self.count = count * len(self.members)

    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Context in which `model` is a sample of one member, with the member's constants; members alternate."""
        sample_index, member = divmod(index, len(self.members))
        samples = self.members[member]
        return temporary_weights(model, {**samples.posterior.constants, **samples.tensors(sample_index)})


@contextmanager
def restored_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context after which each module is in training or evaluation mode as before, also after an exception."""
    modes = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context in which `model` is in evaluation mode; modes, and buffers that forwards change, are restored on exit."""
    with restored_modes(model.modules()):
        model.eval()
        with buffers_kept(model):
            yield


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample `index` in the sample set that has seed `seed`."""
    # A CPU generator keeps the low 32 bits of its seed: a large odd stride keeps seeds and samples apart.
    return (seed * 0x9E3779B1 + index) % 2**63


@contextmanager
def at_posterior_mean(model: nn.Module, posterior: AbstractPosterior) -> Iterator[None]:
    """Context in which `model` is in evaluation mode and has the posterior's mean and constants; restored on exit."""
    check_fits(model, posterior)
    with evaluation_mode(model), temporary_weights(model, {**posterior.constants, **posterior.mean}):
        yield


def as_input(value: Tensor, like: Tensor) -> Tensor:
    """Move a network input to the device of the weight `like`; floating-point inputs also to its dtype."""
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)


def check_fits(model: nn.Module, posterior: AbstractPosterior) -> None:
    """Raise `PosteriorError`, with all differences, unless the posterior has the names and shapes of the model's weights."""
    differences = misfits(model, {**posterior.constants, **posterior.mean})
    if differences:
        raise PosteriorError(
            f"The posterior does not fit this {type(model).__name__} ({differences}). If the model is a submodule of the "
            "LightningModule that was trained, select it: posterior.select('model.')."
        )


def misfits(model: nn.Module, weights: Mapping[str, Any]) -> str:
    """How names and shapes of `weights` differ from the ``state_dict`` of `model`; empty if the weights fit."""
    expected, actual = _shapes(model.state_dict()), _shapes(weights)
    problems = {
        "missing": expected.keys() - actual.keys(),
        "unknown to the model": actual.keys() - expected.keys(),
        "of another shape": {name for name in expected.keys() & actual.keys() if expected[name] != actual[name]},
    }
    return "; ".join(f"{problem}: {', '.join(sorted(names))}" for problem, names in problems.items() if names)


def _shapes(weights: Mapping[str, Any]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in weights.items() if isinstance(value, Tensor)}


@runtime_checkable
class SampledModule(Protocol):
    """A module whose evaluation steps see the outputs of every posterior sample.

    Evaluation callbacks replace these attributes while they are active and restore them afterwards. In a module without
    them, ``self(...)`` returns the average over samples. `lightning_bayes.zoo.BayesClassifier` is an example.

    Attributes:
        averages: Whether `sampled_forward` returns several samples; False unless an evaluation callback is active.
        mean_forward: Computes the output at the posterior mean, ``[batch, ...]``. None unless an evaluation callback is
            active and its samples have a mean.
    """

    averages: bool
    mean_forward: Callable[..., Tensor] | None

    def sampled_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The outputs under each sample, ``[samples, batch, ...]``; one sample unless a callback is active."""
        ...
