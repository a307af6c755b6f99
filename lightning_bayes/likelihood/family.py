"""Targets whose distribution a function of the output states, as one of `torch.distributions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, final

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

from lightning_bayes.errors import ShapeError
from lightning_bayes.likelihood.base import OutputLikelihood, flattened, num_samples
from lightning_bayes.likelihood.mixtures import moments, observed
from lightning_bayes.likelihood.paths import mapped
from lightning_bayes.likelihood.predicted_gaussian import FormName, PredictedGaussian, form_of, has_halves, split
from lightning_bayes.likelihood.predictions import Observed
from lightning_bayes.private_torch import unvalidated

Observation: TypeAlias = Callable[[Any], Distribution]  # from a model's output to the distribution of its targets


@final
class Family(OutputLikelihood):
    """The distribution that a function returns for outputs ``[B, …]``, one for each target.

    A checkpoint and a posterior file hold the function's name alone: to read them, state the function again.

    Args:
        function: From an output, or the tuple or dictionary of tensors that ``forward`` returns, to a distribution.

    Example:
        >>> Family(lambda rate: torch.distributions.Exponential(rate)).summarise(torch.ones(4, 1)).mean
        tensor([1.])
    """

    name: ClassVar[str] = "family"

    def __init__(self, function: Observation) -> None:
        self.function = function

    @property
    def has_noise(self) -> bool:
        """The function states it."""
        return True

    def mean(self, outputs: Any) -> Tensor:
        """The mean of the distribution, or that of draws where torch does not know it."""
        return moments(self.distribution(outputs))[0]

    def distribution(self, outputs: Any) -> Distribution:
        """The targets' distribution, ``[B, …]``."""
        return unvalidated(self.function(outputs))

    def log_prob(self, outputs: Any, targets: Tensor) -> Tensor:
        """``[B]`` for distributions of a whole vector of targets."""
        distribution = self.distribution(outputs)
        shape = distribution.batch_shape + distribution.event_shape
        if targets.numel() != shape.numel():
            raise ShapeError(
                f"The {type(distribution).__name__} of the outputs has shape {list(shape)}, but targets have "
                f"{list(targets.shape)}. Return a distribution with one entry for each target."
            )
        log_prob: Tensor = distribution.log_prob(targets.reshape(shape))
        return log_prob

    def combine(self, outputs: Any) -> Any:
        """Mean and variance of the mixture, if outputs state them in a form of `PredictedGaussian`; else their mean."""
        form = self._form(flattened(outputs))
        return super().combine(outputs) if form is None else PredictedGaussian(form).combine(outputs)

    def _form(self, outputs: Any) -> FormName | None:
        """How outputs ``[B, …, 2 k]``, or a pair of them, state the mean and the variance; None if they do not."""
        if not has_halves(outputs):
            return None
        (mean, second), (of_family, variance) = split(outputs), moments(self.distribution(outputs))
        is_mean = mean.numel() == of_family.numel() == variance.numel() and torch.allclose(
            mean, of_family.reshape(mean.shape).to(mean), rtol=1e-4, atol=1e-6
        )
        return form_of(second, variance.reshape(mean.shape)) if is_mean else None

    def summarise(self, outputs: Any, interval: float = 0.9) -> Observed:
        """Mean, both variances and the interval of the targets."""
        flat = flattened(outputs)
        return observed(self.distribution(flat), num_samples(outputs), interval)

    def sample(self, outputs: Any, generator: Generator) -> Tensor:
        """Draw targets; torch's families use the global random state, which is kept."""
        distribution = self.distribution(mapped(Tensor.detach, outputs))
        devices = [generator.device] if generator.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
            return distribution.sample()

    def completed(self, recorded: OutputLikelihood) -> Family:
        """A function states the distribution in full."""
        return self

    def state(self) -> dict[str, Any]:
        """The function's name, for a message."""
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return {"kind": "raw", "why": f"the file was written with the function {name}, which it does not hold"}

    def target_shape(self, outputs: Any, targets: Tensor) -> tuple[int, ...]:
        """One target for each entry of the distribution."""
        distribution = self.distribution(outputs)
        shape = distribution.batch_shape + distribution.event_shape
        return tuple(shape if shape.numel() == targets.numel() else targets.shape)
