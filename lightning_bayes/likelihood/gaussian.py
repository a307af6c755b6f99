"""Values with Gaussian noise, y ~ N(f, σ²), σ known, fitted later, or unknown.

    combine    the mean
    H          1/σ²

H is the curvature of -log p(y | f) in f.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from torch import Generator, Tensor
from torch.distributions import Normal

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood.base import OutputLikelihood, one_output, require_same_shape
from lightning_bayes.likelihood.mixtures import observed
from lightning_bayes.likelihood.predictions import Moments, Observed, moments_of


@final
class Gaussian(OutputLikelihood):
    """One value for each output, which is its mean; targets have the shape of the outputs.

    Args:
        std: σ in the units of the targets: one number, or nested sequences of one for each output, which broadcast to
            ``[B, …]`` from the last dimension. None: the noise is not known.

    Raises:
        HyperparameterError: If `std` is not positive and finite.
    """

    name: ClassVar[str] = "gaussian"
    cases = ((lambda: Gaussian(0.3), (3,)), (lambda: Gaussian([0.3, 2.0]), (2,)))

    def __init__(self, std: float | Sequence[Any] | None = None) -> None:
        values = torch.as_tensor(1.0 if std is None else std, dtype=torch.float64)
        if not bool(((values > 0) & (values < math.inf)).all()):
            raise HyperparameterError(f"std={std} must be a positive, finite standard deviation of the targets.")
        self.std: Any = None if std is None else values.tolist()

    @property
    def has_noise(self) -> bool:
        """Whether σ is known."""
        return self.std is not None

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Raises a `HyperparameterError` if the noise is not known."""
        require_same_shape("Gaussian", outputs, "means", targets, "targets")
        std = self._std(outputs)
        return -((targets - outputs) / std).square() / 2 - std.log() - math.log(2 * math.pi) / 2

    def summarise(self, outputs: Tensor, interval: float = 0.9) -> Moments | Observed:
        """Mean, both variances and the interval of the targets; mean and variance of the outputs without the noise."""
        if self.std is None:
            return moments_of(outputs)
        flat = outputs.flatten(0, 1)
        return observed(Normal(flat, self._std(flat).expand_as(flat), validate_args=False), len(outputs), interval)

    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Draw a target around each mean, in the shape and dtype of `outputs`."""
        noise = torch.randn(outputs.shape, generator=generator, device=outputs.device, dtype=outputs.dtype)
        return outputs.detach() + self._std(outputs) * noise

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """1/σ of one output."""
        return one_output((1 / self._std(outputs)).expand_as(outputs), index)

    def completed(self, recorded: OutputLikelihood) -> Gaussian:
        """Take σ from the training loss, where it is not stated."""
        if self.std is None and isinstance(recorded, Gaussian):
            return recorded
        return super().completed(recorded)

    def is_refined_by(self, stated: OutputLikelihood) -> bool:
        """Noise that the loss does not tell may be stated: σ, or a family around these means."""
        return super().is_refined_by(stated) or (self.std is None and stated.name in {"gaussian", "family"})

    def _std(self, outputs: Tensor) -> Tensor:
        if self.std is None:
            raise HyperparameterError("Gaussian() does not know its noise. Pass Gaussian(std).")
        return outputs.new_tensor(self.std)
