"""Samples of a model, such as weights drawn from a posterior, and putting one of them into it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.spread import local, put_rows_, rows_like
from lightning_bayes.errors import HyperparameterError, PosteriorError, ShapeError
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior

CACHED_ELEMENTS = 2**26  # 256 MiB of float32: below that, samples are drawn once and kept


class Samples(ABC):
    """S samples of a model's outputs.

    Attributes:
        count: S.
        has_mean: Whether the model itself stands for their mean.
        fixed: Whether a sample is the same function for every batch.
    """

    count: int
    has_mean: bool = True
    fixed: bool = True

    @abstractmethod
    def chosen(self, model: nn.Module, forward: Callable[[], Tensor], indices: Iterable[int]) -> Tensor:
        """Run `forward` under some of the samples; see `outputs`.

        Args:
            model: The model.
            forward: Computes the model's output.
            indices: Numbers of the samples.

        Returns:
            Outputs stacked over them.

        Raises:
            ShapeError: If an output is not a tensor.
        """

    def at_mean(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, `model` is the mean of the samples, which is itself unless they say otherwise."""
        return nullcontext()

    def outputs(self, model: nn.Module, forward: Callable[[], Tensor]) -> Tensor:
        """Run `forward` under every sample.

        Args:
            model: The model that `forward` uses; it is the same afterwards.
            forward: Computes the model's output.

        Returns:
            Outputs stacked over samples, ``[S, …]``; tensors, or it is an error.
        """
        return self.chosen(model, forward, range(self.count))


class NetworkSamples(Samples):
    """Samples each of which is a network, such as one with sampled weights."""

    @abstractmethod
    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Inside, `model` is sample `index`; afterwards it is itself again, also after an exception."""

    def chosen(self, model: nn.Module, forward: Callable[[], Tensor], indices: Iterable[int]) -> Tensor:
        """Run `forward` under some of the samples, one after the other; see `Samples.chosen`."""
        each = []
        for index in indices:
            with self.sampled(model, index):
                each.append(require_tensor(model, forward()))
        return torch.stack(each)


def require_tensor(model: nn.Module, output: object) -> Tensor:
    """Refuse an output that has no average over samples.

    Args:
        model: The model.
        output: Its output.

    Returns:
        The output.

    Raises:
        ShapeError: If it is not a tensor.
    """
    if not isinstance(output, Tensor):
        raise ShapeError(
            f"{type(model).__name__} returned a {type(output).__name__}, which has no average over samples. Let it return "
            "one tensor: logits or means."
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
        """The same samples at another width of the posterior.

        Args:
            scale: c, a factor of the standard deviations; at 0 one sample is left, the mean.

        Returns:
            Samples from the same noise: μ + c (θ_s - μ).
        """
        return PosteriorSamples(ScaledPosterior(self.posterior, scale), self.count if scale else 1, self.seed)

    def weights(self, index: int) -> dict[str, Tensor]:
        """θ_s for s = `index`, by parameter name."""
        if not self._is_cached:
            return self._matched(self._draw(index))
        if not self._cache:
            draws = [self._draw(index) for index in range(self.count)]
            self._average = _average(draws, self.count)
            self._cache = [self._matched(draw) for draw in draws]
        return self._cache[index]

    def _draw(self, index: int) -> dict[str, Tensor]:
        """θ'_s."""
        device = next(iter(self.posterior.mean.values())).device
        generator = torch.Generator(device).manual_seed(sample_seed(self.seed, index))
        return self.posterior.sample(generator)

    def _matched(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        """θ_s from θ'_s."""
        if self.count == 1:
            return draw
        if self._average is None:
            self._average = _average((self._draw(index) for index in range(self.count)), self.count)
        factor = math.sqrt(self.count / (self.count - 1))
        mean = self.posterior.mean
        return {name: mean[name] + factor * (value - self._average[name]) for name, value in draw.items()}

    def sampled(self, model: nn.Module, index: int) -> AbstractContextManager[None]:
        """Inside, `model` has the weights of sample `index`."""
        return placed(model, self.weights(index))


def _average(draws: Iterable[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for draw in draws:  # one draw in memory at a time
        total = {name: total[name] + value if total else value for name, value in draw.items()}
    return {name: value / count for name, value in total.items()}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, all of `model` is in evaluation mode; afterwards each module has its own mode again.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def sample_seed(seed: int, number: int) -> int:
    """Seed of one sample.

    Args:
        seed: Seed of the set.
        number: The sample's number.

    Returns:
        A seed for any generator.
    """
    # A CPU generator keeps the low 32 bits of its seed: a large odd stride keeps seeds and samples apart.
    return (seed * 0x9E3779B1 + number) % 2**63


@contextmanager
def placed(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Inside, `model` has the given weights; its own are back afterwards, bit for bit, also after an exception.

    Args:
        model: The model; under FSDP2 each process takes its own rows.
        weights: Whole values of some or all of its parameters and buffers by name.

    Yields:
        Nothing.
    """
    # With duplicates: a posterior's constants name tied weights by each of their names.
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    targets = {name: tensors[name] for name in weights}
    own = {name: local(target).detach().clone() for name, target in targets.items()}
    try:
        put_rows_(model, [(target, rows_like(weights[name], target)) for name, target in targets.items()])
        yield
    finally:
        put_rows_(model, [(target, own[name]) for name, target in targets.items()])


@contextmanager
def at_posterior_mean(model: nn.Module, posterior: AbstractPosterior) -> Iterator[None]:
    """Inside, `model` is in evaluation mode and has the posterior's mean and constants; afterwards it is as it was.

    Args:
        model: The model; a posterior of other weights is a `PosteriorError`.
        posterior: The posterior.

    Yields:
        Nothing.
    """
    check_fits(model, posterior)
    with evaluation_mode(model), placed(model, {**posterior.constants, **posterior.mean}):
        yield


def as_input(value: Tensor, like: Tensor) -> Tensor:
    """A value as a network's input: where its weights are, and floats in their precision.

    Args:
        value: The value.
        like: One of the weights.

    Returns:
        The value, or a copy.
    """
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)


def check_fits(model: nn.Module, posterior: AbstractPosterior) -> None:
    """Require that `posterior` is one of `model`'s weights.

    Args:
        model: The model.
        posterior: The posterior.

    Raises:
        PosteriorError: Listing missing, unexpected and mis-shaped names.
    """
    listed = misfits(model, {**posterior.constants, **posterior.mean})
    if listed:
        raise PosteriorError(
            f"The posterior is not one of this {type(model).__name__} ({listed}). If the model is a part of the "
            "LightningModule that was trained, select it: posterior.select('model.')."
        )


def misfits(model: nn.Module, weights: Mapping[str, Any]) -> str:
    """The difference that keeps `weights` from being those of `model`.

    Args:
        model: The model.
        weights: As in a ``state_dict``; entries that are not tensors do not count.

    Returns:
        Names that are missing, unknown or of another shape, in words; empty if it fits.
    """
    wanted, given = (
        {n: v.shape for n, v in of.items() if isinstance(v, Tensor)} for of in (model.state_dict(), weights)
    )
    problems = {
        "missing": sorted(wanted.keys() - given.keys()),
        "unknown to the model": sorted(given.keys() - wanted.keys()),
        "of another shape": sorted(n for n in wanted.keys() & given.keys() if wanted[n] != given[n]),
    }
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
