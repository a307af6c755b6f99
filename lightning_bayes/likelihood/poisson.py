"""Independent counts, y ~ Poisson(λ), from log-rates f = log λ or from rates.

    combine    log of the mean rate, or the mean rate
    H          exp f of a log-rate, 1/λ of a rate

H is the curvature of -log p(y | f) in f.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final, final

import torch
from torch import Generator, Tensor
from torch import distributions as families
from typing_extensions import override

from lightning_bayes.likelihood.base import OutputLikelihood, finite, one_output, require_same_shape
from lightning_bayes.likelihood.mixtures import observed
from lightning_bayes.likelihood.predictions import Observed

_LEAST: Final = 1e-12  # rate, for outputs that are rates


@final
class Poisson(OutputLikelihood):
    """One count for each output; targets have the shape of the outputs.

    Args:
        is_log: Whether outputs are log-rates, and not rates.
    """

    name: ClassVar[str] = "poisson"
    cases = ((lambda: Poisson(), (2,)),)

    def __init__(self, is_log: bool = True) -> None:
        self.is_log = is_log

    @property
    def has_noise(self) -> bool:
        """Rates have."""
        return True

    @override
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        require_same_shape("Poisson", outputs, "log-rates", targets, "counts")
        counts = targets.to(outputs.dtype)
        log_rate = outputs if self.is_log else outputs.clamp_min(_LEAST).log()
        return counts * log_rate - self.rate(outputs) - torch.lgamma(counts + 1)

    def rate(self, outputs: Tensor) -> Tensor:
        """λ of each output."""
        return outputs.exp() if self.is_log else outputs.clamp_min(_LEAST)

    def mean(self, outputs: Tensor) -> Tensor:
        """The rate."""
        return self.rate(outputs)

    def combine(self, outputs: Tensor) -> Tensor:
        """The log of the mean rate, or the mean rate."""
        return outputs.logsumexp(0) - math.log(len(outputs)) if self.is_log else outputs.mean(0)

    def summarise(self, outputs: Tensor, interval: float = 0.9) -> Observed:
        """Mean, both variances and the interval of the counts."""
        rate = self.rate(outputs.flatten(0, 1))
        return observed(families.Poisson(rate, validate_args=False), len(outputs), interval)

    def sample(self, outputs: Tensor, generator: Generator) -> Tensor:
        """Draw a count for each output, in the shape and dtype of `outputs`."""
        return torch.poisson(self.rate(finite(outputs)), generator=generator)

    def root(self, outputs: Tensor, index: int) -> Tensor:
        """√(exp f) of one log-rate, 1/√λ of one rate."""
        return one_output((outputs / 2).exp() if self.is_log else self.rate(outputs).rsqrt(), index)

    def completed(self, recorded: OutputLikelihood) -> Poisson:
        """Take the form of the output from the training loss."""
        return recorded if isinstance(recorded, Poisson) else super().completed(recorded)
