"""The mean-field Gaussian posterior q(θ) = Π_j N(θ_j; μ_j, 1/P_j) with the prior p(θ) = Π_j N(θ_j; 0, 1/δ_j)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from lightning_bayes.errors import PosteriorError

TensorDict = dict[str, Tensor]


@final
@dataclass(frozen=True)
class MeanField:
    """A Gaussian posterior over named weights, independent across weights.

    Attributes:
        mean: μ by parameter name.
        precision: P = 1/Σ by parameter name, positive, shaped like the mean.
        prior_precision: δ by parameter name.
        num_data: N, the number of training examples the posterior has seen.
        constants: Parameters without noise and buffers (BatchNorm statistics, say) by name: what else a prediction needs.

    Example:
        >>> q = MeanField({"w": torch.zeros(2)}, {"w": torch.full((2,), 4.0)}, {"w": 1.0}, num_data=10)
        >>> q.std["w"], round(q.entropy().item(), 4), round(q.kl().item(), 4)
        (tensor([0.5000, 0.5000]), 1.4516, 0.6363)
    """

    mean: TensorDict
    precision: TensorDict
    prior_precision: dict[str, float]
    num_data: float
    constants: TensorDict = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the parts fit.

        Raises:
            PosteriorError: If they do not.
        """
        wrong = [
            name
            for name, mean in self.mean.items()
            if name not in self.prior_precision or self.precision.get(name, mean.new_zeros(0)).shape != mean.shape
        ]
        if wrong or self.mean.keys() != self.precision.keys():
            extra = sorted(self.precision.keys() - self.mean.keys())
            raise PosteriorError(f"Mean, precision and prior do not fit for {', '.join(wrong + extra)}.")

    @property
    def std(self) -> TensorDict:
        """√Σ by parameter name."""
        return {name: precision.rsqrt() for name, precision in self.precision.items()}

    def sample(self, generator: torch.Generator | None = None) -> TensorDict:
        """Draw one set of weights.

        Args:
            generator: Source of the noise, on the posterior's device; the global one by default.

        Returns:
            θ = μ + ε/√P by parameter name, without `constants`.
        """
        return {
            name: mean + torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype) * std
            for (name, mean), std in zip(self.mean.items(), self.std.values(), strict=True)
        }

    def log_prob(self, weights: TensorDict) -> Tensor:
        """Log q(θ) in nats.

        Args:
            weights: θ by parameter name.

        Returns:
            A scalar.
        """
        terms = [
            0.5 * (p.log() - math.log(2 * math.pi) - p * (weights[name] - self.mean[name]).square()).sum()
            for name, p in self.precision.items()
        ]
        return torch.stack(terms).sum()

    def entropy(self) -> Tensor:
        """H[q] in nats: ½ Σ_j (1 + log 2π - log P_j), a scalar."""
        terms = [0.5 * (1 + math.log(2 * math.pi) - p.log()).sum() for p in self.precision.values()]
        return torch.stack(terms).sum()

    def kl(self) -> Tensor:
        """KL(q ‖ p) in nats: ½ Σ_j (δ/P_j + δ μ_j² - 1 + log P_j - log δ), a scalar."""
        terms = []
        for name, p in self.precision.items():
            delta = self.prior_precision[name]
            terms.append(0.5 * (delta / p + delta * self.mean[name].square() - 1 + p.log() - math.log(delta)).sum())
        return torch.stack(terms).sum()

    def select(self, prefix: str) -> MeanField:
        """The posterior of a submodule.

        Args:
            prefix: Beginning of its parameters' names, such as ``"model."``.

        Returns:
            The same posterior without the prefix and without what does not begin with it.

        Raises:
            PosteriorError: If no parameter begins with the prefix.
        """

        def cut(values: dict[str, Any]) -> dict[str, Any]:
            return {name[len(prefix) :]: v for name, v in values.items() if name.startswith(prefix)}

        if not cut(self.mean):
            raise PosteriorError(
                f"No parameter of the posterior begins with {prefix!r}; it has {', '.join(self.mean)}."
            )
        return MeanField(
            cut(self.mean), cut(self.precision), cut(self.prior_precision), self.num_data, cut(self.constants)
        )

    def to(self, device: torch.device | str) -> MeanField:
        """The posterior on another device."""

        def moved(values: TensorDict) -> TensorDict:
            return {name: value.to(device) for name, value in values.items()}

        return MeanField(
            moved(self.mean), moved(self.precision), self.prior_precision, self.num_data, moved(self.constants)
        )

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers only, safe for ``torch.load(..., weights_only=True)``."""
        return {
            "mean": self.mean,
            "precision": self.precision,
            "prior_precision": self.prior_precision,
            "num_data": self.num_data,
            "constants": self.constants,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> MeanField:
        """Inverse of `state_dict`."""
        return cls(**state)
