"""The base class of all Gaussian posteriors over weights.

A family implements

    θ = μ + T ε,  T Tᵀ = Σ        log det Σ⁻¹        (θ-μ)ᵀ Σ⁻¹ (θ-μ)        diag Σ        its state as tensors

The prior is p(θ) = Π_j N(θ_j; μ₀_j, 1/δ_j), with μ₀ = 0 by default, so that

    log q(θ) = ½ (log det Σ⁻¹ - D log 2π - (θ-μ)ᵀ Σ⁻¹ (θ-μ))
    H[q]     = ½ (D (1 + log 2π) - log det Σ⁻¹)
    KL(q ‖ p) = ½ (Σ_j (δ_j (Σ_jj + (μ_j - μ₀_j)²) - log δ_j) - D + log det Σ⁻¹)
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_bayes.errors import PosteriorError

TensorDict: TypeAlias = dict[str, Tensor]
PosteriorT = TypeVar("PosteriorT", bound="AbstractPosterior")


class AbstractPosterior(ABC):
    """A Gaussian posterior over named weights.

    Attributes:
        mean: μ by parameter name.
        prior_precision: δ by parameter name: a number, or a tensor shaped like the mean.
        num_data: N, the number of training examples behind the posterior.
        constants: Deterministic parameters and buffers, such as BatchNorm statistics, by name.
        prior_mean: μ₀ by parameter name, for parameters whose prior is not centred at zero.
        linearized: Whether predictions are linearised by default; see `ScaledPosterior`.
        temperature: What divides logits in predictions by default; see `ScaledPosterior`.
        likelihood: What the training loss says about the network's outputs, a `lightning_bayes.likelihood.Likelihood`; None
            if unknown. See `with_likelihood`.
    """

    mean: TensorDict
    prior_precision: Mapping[str, float | Tensor]
    num_data: float
    constants: TensorDict
    prior_mean: Mapping[str, Tensor] = MappingProxyType({})
    linearized: bool = False
    temperature: float = 1.0
    likelihood: Any = None

    @abstractmethod
    def transform(self, noise: TensorDict) -> TensorDict:
        """θ = μ + T ε with T Tᵀ = Σ, for standard normal ε by parameter name, shaped like the mean."""

    @abstractmethod
    def variance(self) -> TensorDict:
        """Variances, diag Σ, by parameter name."""

    @abstractmethod
    def log_det_precision(self) -> Tensor:
        """Log det Σ⁻¹, a scalar."""

    @abstractmethod
    def squared_distance(self, weights: TensorDict) -> Tensor:
        """(θ-μ)ᵀ Σ⁻¹ (θ-μ), a scalar, for θ by parameter name."""

    def statistics(self, weights: TensorDict) -> TensorDict:
        """Buffers of the network with these weights where they differ from `constants`; see `ScaledPosterior`."""
        return {}

    def blocks(self) -> list[list[str]]:
        """Groups of parameter names that may be correlated. The default is a single group with all parameters."""
        return [list(self.mean)]

    def variance_along(self, directions: TensorDict) -> Tensor:
        """dᵀ Σ d, the variance of dᵀ θ, for d ``[B, *shape]`` by name in whole blocks; missing parameters have d = 0."""
        zeros = {name: torch.zeros_like(mean) for name, mean in self.mean.items()}
        transpose = torch.func.vjp(self.transform, zeros)[1]  # Tᵀ, because transform is μ + T ε

        def variance(direction: TensorDict) -> Tensor:
            (noise,) = transpose({**zeros, **direction})
            return torch.stack([part.square().sum() for part in noise.values()]).sum()

        variances: Tensor = torch.func.vmap(variance)(directions)
        return variances

    def variance_along_rows(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """`variance_along` of d = vec(Σ_t left_t right_tᵀ), ``[B, T, out]`` and ``[B, T, K]``, in a block by itself."""
        return self.variance_along({name: (left.mT @ right).view(-1, *self.mean[name].shape)})

    def select(self: PosteriorT, prefix: str) -> PosteriorT:
        """The marginal posterior of a submodule.

        Raises `PosteriorError` if no parameter has the prefix. This implementation assumes that the submodule's parameters
        are independent of all others.

        Args:
            prefix: Prefix of the submodule's parameter names, such as ``"model."``.

        Returns:
            The marginal, with the prefix removed from all names.
        """
        return type(self)(**self._selected_fields(prefix)).with_likelihood(self.likelihood)

    def with_likelihood(self: PosteriorT, likelihood: Any) -> PosteriorT:
        """The same posterior with what is known of the network's outputs."""
        found = copy.copy(self)
        object.__setattr__(found, "likelihood", likelihood)  # the families are frozen
        return found

    def state_dict(self) -> dict[str, Any]:
        """The fields of the dataclass: tensors, numbers and names, safe for ``torch.load(..., weights_only=True)``."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]  # each family is a dataclass

    def __repr__(self) -> str:
        span = " to ".join(dict.fromkeys(f"{end:.4g}" for end in self.prior_range()))
        return (
            f"{type(self).__name__}({self._size} weights in {len(self.mean)} tensors, num_data={self.num_data:g}, "
            f"prior_precision={span})"
        )

    def sample(self, generator: torch.Generator | None = None) -> TensorDict:
        """Draw one set of weights by name, without `constants`; the generator is on the posterior's device."""
        return self.transform(
            {
                name: torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
                for name, mean in self.mean.items()
            }
        )

    def log_prob(self, weights: TensorDict) -> Tensor:
        """Log q(θ) in nats, a scalar, for θ by parameter name."""
        return 0.5 * (self.log_det_precision() - self._size * math.log(2 * math.pi) - self.squared_distance(weights))

    def entropy(self) -> Tensor:
        """H[q] in nats, a scalar."""
        return 0.5 * (self._size * (1 + math.log(2 * math.pi)) - self.log_det_precision())

    def kl(self) -> Tensor:
        """KL(q ‖ p) in nats, a scalar; nan if the posterior has no prior, as for SWAG."""
        variances, terms = self.variance(), []
        for name, mean in self.mean.items():
            delta, distance = self.prior_precision[name], mean - self.prior_mean.get(name, 0.0)
            log = delta.log() if isinstance(delta, Tensor) else math.log(delta)
            terms.append((delta * (variances[name] + distance.square()) - 1 - log).sum())
        return 0.5 * (torch.stack(terms).sum() + self.log_det_precision())

    def prior_range(self) -> tuple[float, ...]:
        """The smallest and the largest δ; empty without parameters."""
        ends = [torch.as_tensor(delta).aminmax() for delta in self.prior_precision.values()]
        return (float(min(end.min for end in ends)), float(max(end.max for end in ends))) if ends else ()

    @property
    def std(self) -> TensorDict:
        """√(diag Σ) by parameter name."""
        return {name: variance.sqrt() for name, variance in self.variance().items()}

    def to(self: PosteriorT, device: torch.device | str) -> PosteriorT:
        """The posterior on another device."""
        return self.from_state_dict(moved(self.state_dict(), device)).with_likelihood(self.likelihood)

    @classmethod
    def from_state_dict(cls: type[PosteriorT], state: dict[str, Any]) -> PosteriorT:
        """Inverse of `state_dict`."""
        return cls(**state)

    def _require_match(self, fields: str, wrong: Iterable[str]) -> None:
        """Raise a `PosteriorError` if `fields` do not match for the names `wrong`, or a parameter has no prior."""
        names = dict.fromkeys([*wrong, *(name for name in self.mean if name not in self.prior_precision)])
        if names:
            raise PosteriorError(f"{fields} do not match for {', '.join(names)}.")

    @property
    def _size(self) -> int:
        return sum(mean.numel() for mean in self.mean.values())

    def _selected_fields(self, prefix: str) -> dict[str, Any]:
        """The fields of the dataclass, restricted to names with this prefix; see `strip_prefix`."""
        if not strip_prefix(self.mean, prefix):
            raise PosteriorError(
                f"No parameter of the posterior starts with {prefix!r}; it has {', '.join(self.mean)}."
            )
        return {
            name: strip_prefix(value, prefix) if isinstance(value, dict) else value
            for name, value in self.state_dict().items()
        }


def as_rows(values: Tensor) -> Tensor:
    """Values ``[B, *shape]`` as rows ``[B, n]``; a scalar parameter has one column."""
    return values.reshape(len(values), -1)


def scaled_squares(left: Tensor, right: Tensor, divisors: Tensor) -> Tensor:
    """Σ_jk (Σ_t left_tj right_tk)² / D_jk, ``[B]``, of ``[B, T, out]``, ``[B, T, K]`` and ``[out, K]``."""
    if left.shape[1] == 1:  # without a matrix per example
        return ((left[:, 0].square() @ divisors.reciprocal()) * right[:, 0].square()).sum(1)
    return as_rows((left.mT @ right).square_().div_(divisors)).sum(1)


def strip_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Keep the entries whose name starts with `prefix`, and remove it from keys and from values that are names."""
    selected: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith(prefix):
            selected[name.removeprefix(prefix)] = value.removeprefix(prefix) if isinstance(value, str) else value
    return selected


def moved(value: Any, device: torch.device | str) -> Any:
    """Move all tensors inside dictionaries, tuples and lists to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(inner, device) for name, inner in value.items()}
    return type(value)(moved(inner, device) for inner in value) if isinstance(value, (tuple, list)) else value


DEFAULT_LIMIT_MIB = 1024.0


def require_memory(what: str, elements: int, bytes_each: int, limit_mib: float, instead: str) -> None:
    """Raise `PosteriorError` above the limit. The message starts with `what` and recommends `instead`."""
    size = elements * bytes_each
    if size > limit_mib * 2**20:
        raise PosteriorError(
            f"{what} would take {format_bytes(size)}, more than limit_mib={limit_mib:g}. Use {instead}, or raise limit_mib."
        )


def format_bytes(size: float) -> str:
    """A number of bytes with one decimal and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
