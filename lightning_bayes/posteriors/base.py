"""The base of every Gaussian posterior over weights, on five quantities that its family fills in.

    θ = μ + T ε,  T Tᵀ = Σ        log det Σ⁻¹        (θ-μ)ᵀ Σ⁻¹ (θ-μ)        diag Σ        its state as tensors

The prior is p(θ) = Π_j N(θ_j; μ₀_j, 1/δ_j), with μ₀ = 0 unless a family says otherwise, so that

    log q(θ) = ½ (log det Σ⁻¹ - D log 2π - (θ-μ)ᵀ Σ⁻¹ (θ-μ))
    H[q]     = ½ (D (1 + log 2π) - log det Σ⁻¹)
    KL(q ‖ p) = ½ (Σ_j (δ_j (Σ_jj + (μ_j - μ₀_j)²) - log δ_j) - D + log det Σ⁻¹)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_bayes.errors import PosteriorError

TensorDict: TypeAlias = dict[str, Tensor]
ValueT = TypeVar("ValueT")
PosteriorT = TypeVar("PosteriorT", bound="AbstractPosterior")


class AbstractPosterior(ABC):
    """A Gaussian posterior over named weights.

    Attributes:
        mean: μ by parameter name.
        prior_precision: δ by parameter name, or of each weight, shaped like the mean.
        num_data: N, the number of training examples the posterior has seen.
        constants: Parameters without noise and buffers (BatchNorm statistics, say) by name: what else a prediction needs.
        prior_mean: μ₀ by parameter name, for parameters whose prior is not centred at zero.
    """

    mean: TensorDict
    prior_precision: Mapping[str, float | Tensor]
    num_data: float
    constants: TensorDict
    prior_mean: Mapping[str, Tensor] = MappingProxyType({})

    @abstractmethod
    def transform(self, noise: TensorDict) -> TensorDict:
        """Turn standard normal noise into weights.

        Args:
            noise: ε by parameter name, shaped like the mean.

        Returns:
            θ = μ + T ε with T Tᵀ = Σ, by parameter name.
        """

    @abstractmethod
    def variance(self) -> TensorDict:
        """Variances, diag Σ, by parameter name."""

    @abstractmethod
    def log_det_precision(self) -> Tensor:
        """Log det Σ⁻¹, a scalar."""

    @abstractmethod
    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ Σ⁻¹ (θ-μ), a scalar.

        Args:
            weights: θ by parameter name.
        """

    def blocks(self) -> list[list[str]]:
        """Names of the weights that are correlated with each other, block by block; all in one unless a family says more."""
        return [list(self.mean)]

    def variance_along(self, directions: TensorDict) -> Tensor:
        """dᵀ Σ d of B directions, the variance of dᵀ θ.

        Args:
            directions: d by name, ``[B, *shape]``, for the weights of one or several whole blocks; d is 0 elsewhere.

        Returns:
            ``[B]``.
        """
        zeros = {name: torch.zeros_like(mean) for name, mean in self.mean.items()}
        pull_back = torch.func.vjp(self.transform, zeros)[1]  # transform is μ + T ε, so this is Tᵀ

        def one(direction: TensorDict) -> Tensor:
            (noise,) = pull_back({**zeros, **direction})
            return torch.stack([part.square().sum() for part in noise.values()]).sum()

        variances: Tensor = torch.func.vmap(one)(directions)
        return variances

    def variance_along_outer(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """dᵀ Σ d of directions d = vec(left rightᵀ) in a matrix that is a block of its own.

        Args:
            name: The name of the matrix, ``[out, in]``.
            left: ``[B, out]``.
            right: ``[B, in]``.

        Returns:
            ``[B]``.
        """
        return self.variance_along({name: left[:, :, None] * right[:, None, :]})

    def select(self: PosteriorT, prefix: str) -> PosteriorT:
        """The posterior of a submodule, of independent parameters unless a family says otherwise.

        Args:
            prefix: Beginning of its parameters' names, such as ``"model."``.

        Returns:
            The marginal of its weights, without the prefix. Where no parameter begins with it, that is a `PosteriorError`.
        """
        self._require_selected(prefix)
        parts = self.state_dict().items()
        return type(self)(**{name: cut(value, prefix) if isinstance(value, dict) else value for name, value in parts})

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and names only, safe for ``torch.load(..., weights_only=True)``: the fields of the dataclass."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]  # each family is one

    def __repr__(self) -> str:
        span = " to ".join(dict.fromkeys(f"{end:.4g}" for end in self.prior_range()))
        return (
            f"{type(self).__name__}({self._size} weights in {len(self.mean)} tensors, num_data={self.num_data:g}, "
            f"prior_precision={span})"
        )

    def sample(self, generator: torch.Generator | None = None) -> TensorDict:
        """Draw one set of weights.

        Args:
            generator: Source of the noise, on the posterior's device; the global one by default.

        Returns:
            θ by parameter name, without `constants`.
        """
        return self.transform(
            {
                name: torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
                for name, mean in self.mean.items()
            }
        )

    def log_prob(self, weights: TensorDict) -> Tensor:
        """Log q(θ) in nats.

        Args:
            weights: θ by parameter name.

        Returns:
            A scalar.
        """
        return 0.5 * (self.log_det_precision() - self._size * math.log(2 * math.pi) - self.squared_distance(weights))

    def entropy(self) -> Tensor:
        """H[q] in nats, a scalar."""
        return 0.5 * (self._size * (1 + math.log(2 * math.pi)) - self.log_det_precision())

    def kl(self) -> Tensor:
        """KL(q ‖ p) in nats, a scalar; nan if the posterior has no prior, as SWAG's."""
        variances, terms = self.variance(), []
        for name, mean in self.mean.items():
            delta, distance = self.prior_precision[name], mean - self.prior_mean.get(name, 0.0)
            log = delta.log() if isinstance(delta, Tensor) else math.log(delta)
            terms.append((delta * (variances[name] + distance.square()) - 1 - log).sum())
        return 0.5 * (torch.stack(terms).sum() + self.log_det_precision())

    def prior_range(self) -> tuple[float, ...]:
        """The smallest and the largest δ; nothing where there are no weights."""
        ends = [torch.as_tensor(delta).aminmax() for delta in self.prior_precision.values()]
        return (float(min(end.min for end in ends)), float(max(end.max for end in ends))) if ends else ()

    @property
    def std(self) -> TensorDict:
        """√(diag Σ) by parameter name."""
        return {name: variance.sqrt() for name, variance in self.variance().items()}

    def to(self: PosteriorT, device: torch.device | str) -> PosteriorT:
        """The posterior on another device."""
        return self.from_state_dict(moved(self.state_dict(), device))

    @classmethod
    def from_state_dict(cls: type[PosteriorT], state: dict[str, Any]) -> PosteriorT:
        """Inverse of `state_dict`."""
        return cls(**state)

    @property
    def _size(self) -> int:
        return sum(mean.numel() for mean in self.mean.values())

    def _require_selected(self, prefix: str) -> None:
        if not cut(self.mean, prefix):
            raise PosteriorError(
                f"No parameter of the posterior begins with {prefix!r}; it has {', '.join(self.mean)}."
            )


def cut(values: Mapping[str, ValueT], prefix: str) -> dict[str, ValueT]:
    """Keep what begins with `prefix`, without it."""
    return {name[len(prefix) :]: value for name, value in values.items() if name.startswith(prefix)}


def moved(value: Any, device: torch.device | str) -> Any:
    """Move all tensors inside dictionaries, tuples and lists to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(inner, device) for name, inner in value.items()}
    return type(value)(moved(inner, device) for inner in value) if isinstance(value, (tuple, list)) else value
