"""The noise of a Gaussian likelihood y ~ N(f, 1/τ), whose precision τ is fixed, learned, or has a Gamma posterior.

    fixed      τ = 1/σ²
    learned    τ = 1/r²                                      maximum likelihood
    gamma      q(τ) = Gamma(a₀ + N/2, b₀ + N r²/2)           maximises the bound of Zhang et al. 2018, eqs. 23-24

r² is the mean of (y - f)² over examples and weight samples, as a running average over about one epoch:
r² ← r² + (B/N) (batch mean - r²). With the prior Gamma(a₀, b₀), a₀ = b₀ = 6, the optimal q(τ) has this closed form, so it
needs no learning rate. The paper follows gradients of the same bound (https://arxiv.org/abs/1712.02390).

    E log N(y | f, 1/τ) = ½ (ψ(α) - log β - (α/β) (y - f)² - log 2π)        q(τ) = Gamma(α, β)
    ∫ N(y | f, 1/τ) q(τ) dτ = Student-t with 2α degrees of freedom, location f and scale √(β/α)

The state is stored in buffers rather than parameters, so that no callback perturbs it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, StudentT

from lightning_bayes.errors import HyperparameterError

NoiseName: TypeAlias = Literal["fixed", "learned", "gamma"]
PUBLISHED_PRIOR: Final = (6.0, 6.0)  # (a₀, b₀) of Zhang et al.


class Noise(nn.Module, ABC):
    """The distribution of the noise precision τ."""

    @abstractmethod
    def moments(self) -> tuple[Tensor, Tensor]:
        """E[τ] and E[log τ], scalars."""

    def observe(self, residuals: Tensor) -> None:
        """Update the state with the residuals y - f of a batch, ``[batch]``, under one weight sample."""

    def count(self, num_data: int) -> None:
        """Set the number of training examples N."""

    def distribution(self, mean: Tensor) -> Distribution:
        """∫ p(y | f, τ) q(τ) dτ around means of any shape."""
        return Normal(mean, self.moments()[0].to(mean).rsqrt(), validate_args=False)

    def expected_nll(self, mean: Tensor, targets: Tensor) -> Tensor:
        """The loss: the mean over examples of -E log p(y | f, τ), in nats, for f and y of shape ``[batch]``."""
        precision, log_precision = (moment.to(mean.dtype) for moment in self.moments())
        squared = ((targets - mean) * precision.sqrt()).square().mean()
        return 0.5 * squared + 0.5 * (math.log(2 * math.pi) - log_precision)

    def log_density(self, mean: Tensor, targets: Tensor) -> Tensor:
        """Log ∫ p(y | f, τ) q(τ) dτ in nats, for f of any shape and y broadcastable to it."""
        # In float64, because a Student-t with many degrees of freedom subtracts large log-gammas.
        return self.distribution(mean.double()).log_prob(targets.double()).to(mean.dtype)


@final
class FixedNoise(Noise):
    """Noise with a fixed standard deviation σ."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def moments(self) -> tuple[Tensor, Tensor]:
        """1/σ² and its logarithm."""
        precision = torch.tensor(self.std, dtype=torch.float64) ** -2
        return precision, precision.log()


class RunningNoise(Noise, ABC):
    """Noise estimated from a running average of squared residuals."""

    mean_square: Tensor
    num_data: Tensor

    def __init__(self, std: float) -> None:
        super().__init__()
        self.register_buffer("mean_square", torch.tensor(float(std) ** 2))
        self.register_buffer("num_data", torch.tensor(0.0))

    def count(self, num_data: int) -> None:
        """Set N."""
        self.num_data.fill_(num_data)

    @torch.no_grad()
    def observe(self, residuals: Tensor) -> None:
        """r² ← r² + (B/N) (mean over the batch - r²)."""
        batch = residuals.detach().to(self.mean_square.dtype).square().mean()
        rate = (len(residuals) / self.num_data).clamp_max(1.0)
        moved = torch.lerp(self.mean_square, batch, rate)
        # The optimizer skips a step with a non-finite loss, so this update skips it too.
        self.mean_square.copy_(torch.where(moved.isfinite(), moved, self.mean_square))


@final
class LearnedNoise(RunningNoise):
    """Maximum-likelihood noise."""

    def moments(self) -> tuple[Tensor, Tensor]:
        """1/r² and its logarithm."""
        precision = 1 / self.mean_square.clamp_min(torch.finfo(self.mean_square.dtype).tiny)
        return precision, precision.log()


@final
class GammaNoise(RunningNoise):
    """Noise with a Gamma prior and posterior."""

    def __init__(self, std: float, prior: tuple[float, float] = PUBLISHED_PRIOR) -> None:
        super().__init__(std)
        self.prior = prior

    def posterior(self) -> tuple[Tensor, Tensor]:
        """Shape α and rate β of q(τ)."""
        return gamma_posterior(self.num_data, self.mean_square, self.prior)

    def moments(self) -> tuple[Tensor, Tensor]:
        """α/β and ψ(α) - log β."""
        shape, rate = self.posterior()
        return shape / rate, torch.digamma(shape) - rate.log()

    def distribution(self, mean: Tensor) -> Distribution:
        """Student-t around means of any shape."""
        shape, rate = (value.to(mean) for value in self.posterior())
        return StudentT(2 * shape, mean, (rate / shape).sqrt(), validate_args=False)


def gamma_posterior(num_data: Tensor, mean_square: Tensor, prior: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Shape α = a₀ + N/2 and rate β = b₀ + N r²/2 of the q(τ) that maximises the bound, for r² of any shape."""
    return prior[0] + num_data / 2, prior[1] + num_data / 2 * mean_square


def make_noise(name: NoiseName, std: float, prior: tuple[float, float]) -> Noise:
    """Build the noise by name; raises HyperparameterError that lists every argument out of range."""
    errors = []
    if name not in {"fixed", "learned", "gamma"}:
        errors.append(f"noise={name!r}, but it must be 'fixed', 'learned' or 'gamma'")
    if not 0 < std < math.inf:
        errors.append(f"noise_std={std}, but a standard deviation must be positive and finite")
    if len(prior) != 2 or not all(0 < value < math.inf for value in prior):
        errors.append(f"noise_prior={tuple(prior)}, but shape and rate must be positive and finite")
    if errors:
        raise HyperparameterError(f"BayesRegressor got {'; '.join(errors)}.")
    if name == "gamma":
        return GammaNoise(std, prior)
    return LearnedNoise(std) if name == "learned" else FixedNoise(std)
