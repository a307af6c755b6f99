"""The effective hyperparameters of a parameter group at its current step: Ñ, τ, δ̃ and γ. Nothing else computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.posteriors.shaped_noise import FLATNESS


class Effective(NamedTuple):
    """The effective hyperparameters of a parameter group at its current step; see `effective`."""

    num_data: float  # Ñ = ρN
    kl_weight: float  # τ, warm-up included
    prior_precision: float  # δ
    prior: float  # δ̃ = τδ/Ñ
    damping: float  # γ
    counted_damping: float  # γ where it counts in the noise, else 0
    bound_precision: float  # 1/σ_max², or 0 without a bound
    relative_noise: float | None  # κ
    noise_flatness: float  # ε
    stated_prior: float  # δ̃, or 0 where another optimizer moves the mean and no prior is stated

    @property
    def scale(self) -> float:
        """Ñ/τ, from curvature per example to posterior precision."""
        return self.num_data / self.kl_weight

    def prior_of(self, precision: Tensor) -> Tensor:
        """δ̃ of weights with precisions δ of their own."""
        own: Tensor = _strength(precision, self.kl_weight, self.num_data)
        return own

    @property
    def noise_damping(self) -> float:
        """The damping in the noise: γ where it counts, and (τ/Ñ)/σ_max²."""
        return self.counted_damping + self.bound_precision / self.scale

    @property
    def precision_arguments(self) -> dict[str, float]:
        """The arguments of `posteriors.precision`."""
        return {**self.start_arguments, "damping": self.noise_damping}

    @property
    def start_arguments(self) -> dict[str, float]:
        """The arguments of `posteriors.initial_curvature`, which does not see the bound σ_max."""
        return {
            "num_data": self.num_data,
            "prior_precision": self.prior_precision,
            "kl_weight": self.kl_weight,
            "damping": self.counted_damping,
        }

    @property
    def stated_damping(self) -> float:
        """The strength p in `posteriors.shaped_noise`: a stated prior's δ̃, and what counts as damping in the noise."""
        return self.stated_prior + self.noise_damping


def effective(group: Mapping[str, Any]) -> Effective:
    """Compute Ñ, τ, δ̃ and γ of a parameter group at its current step; the only place where they are computed.

    τ grows linearly from ``kl_warmup_init``·τ to τ over ``kl_warmup_steps``.

    Args:
        group: A parameter group of a noisy optimizer, live or from a checkpoint.

    Returns:
        The effective values.

    Raises:
        HyperparameterError: If ``num_data`` is not set.

    Example:
        >>> group = {"num_data": 50, "data_augmentation_factor": 2.0, "prior_precision": 10.0, "kl_weight": 0.5,
        ...          "kl_warmup_steps": 0, "kl_warmup_init": 0.1, "damping": 0.1, "damping_in_noise": False, "step": 0}
        >>> effective(group).prior  # 0.5 · 10 / (2 · 50)
        0.05
    """
    if group["num_data"] is None:
        raise HyperparameterError("num_data is not set. Pass num_data=len(training_set).")
    num_data = group["num_data"] * group["data_augmentation_factor"]
    steps, start = group["kl_warmup_steps"], group["kl_warmup_init"]
    done = min(1.0, group["step"] / steps) if steps else 1.0
    kl_weight = float(group["kl_weight"] * (start + (1 - start) * done))
    prior_precision = group["prior_precision"]
    prior = _strength(prior_precision, kl_weight, num_data)
    return Effective(
        num_data=num_data,
        kl_weight=kl_weight,
        prior_precision=prior_precision,
        prior=prior,
        damping=group["damping"],
        counted_damping=group["damping"] if group["damping_in_noise"] else 0.0,
        bound_precision=group["max_noise"] ** -2 if group.get("max_noise") else 0.0,
        relative_noise=group.get("relative_noise"),
        noise_flatness=group.get("noise_flatness") or FLATNESS,
        stated_prior=prior if _is_stated(group) else 0.0,
    )


def _strength(prior_precision: Any, kl_weight: float, num_data: float) -> Any:
    """δ̃ = τδ/Ñ."""
    return prior_precision * kl_weight / num_data


def _is_stated(group: Mapping[str, Any]) -> bool:
    """Whether the mean feels the prior."""
    return group.get("step_rule") != "user" or bool(group.get("prior_on_mean", True))
