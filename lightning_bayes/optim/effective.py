"""Effective hyperparameters: Ñ, τ, δ̃ and γ of a parameter group at its current step. They are computed only here.

An L2 penalty (``weight_decay``) that is the prior gives δ̃ directly, hence δ = Ñ·wd/τ, whatever its schedule; beside a loss
that is a sum over n examples, δ̃ = wd/n. During the
warm-up τ grows linearly from ``kl_warmup_init * kl_weight`` to ``kl_weight`` over ``kl_warmup_steps``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.posteriors.shaped_noise import FLATNESS


class Effective(NamedTuple):
    """Effective hyperparameters of a parameter group at its current step; see `effective`."""

    num_data: float  # Ñ = ρN
    kl_weight: float  # τ, warm-up included
    scale: float  # Ñ/τ, the factor from curvature per example to posterior precision
    prior_precision: float  # δ
    prior: float  # δ̃ = τδ/Ñ
    penalty: float  # the group's L2 penalty, whose gradient the optimizer that holds it adds; 0 if none
    damping: float  # γ
    counted_damping: float  # γ if it is part of the noise, else 0
    noise_damping: float  # damping in the noise: γ if it is part of the noise, plus (τ/Ñ)/σ_max²
    relative_noise: float | None  # κ
    noise_flatness: float  # ε
    stated_prior: float  # δ̃, or 0 if the user's optimizer updates the mean and no prior is set
    stated_damping: float  # p in `posteriors.shaped_noise`: `stated_prior` plus `noise_damping`

    def prior_of(self, precision: Tensor) -> Tensor:
        """δ̃ of each weight, given a prior precision δ of each weight."""
        return precision * self.kl_weight / self.num_data

    @property
    def start_arguments(self) -> dict[str, float]:
        """Keyword arguments of `posteriors.initial_curvature`, which ignores the bound σ_max."""
        return {
            "num_data": self.num_data,
            "prior_precision": self.prior_precision,
            "kl_weight": self.kl_weight,
            "damping": self.counted_damping,
        }


def effective(group: Mapping[str, Any]) -> Effective:
    """Compute Ñ, τ, δ̃ and γ of a parameter group at its current step; raises `HyperparameterError` without N."""
    settings = group["posterior"]
    if settings["num_data"] is None:
        raise HyperparameterError("num_data is not set. Pass num_data=len(training_set).")
    num_data = settings["num_data"] * settings["data_augmentation_factor"]
    warmup_steps, start = settings["kl_warmup_steps"], settings["kl_warmup_init"]
    progress = min(1.0, settings["step"] / warmup_steps) if warmup_steps else 1.0
    kl_weight = float(settings["kl_weight"] * (start + (1 - start) * progress))
    scale = num_data / kl_weight
    prior_precision = settings["prior_precision"]
    prior = prior_precision * kl_weight / num_data
    decay = settings.get("decay", "decoupled")
    penalty = 0.0 if decay in ("decoupled", "unknown") else float(group.get("weight_decay") or 0.0)
    if decay == "prior" and penalty:
        prior = penalty / settings.get("loss_examples", 1.0)
        prior_precision = prior * scale
    moves_with_prior = settings.get("step_rule") != "user" or settings.get("prior_on_mean", True)
    is_prior_stated = moves_with_prior or (decay == "prior" and penalty > 0)
    stated_prior = prior if is_prior_stated else 0.0
    counted_damping = settings["damping"] if settings["damping_in_noise"] else 0.0
    bound = settings["max_noise"] ** -2 / scale if settings.get("max_noise") else 0.0  # (τ/Ñ)/σ_max²
    noise_damping = counted_damping + bound
    return Effective(
        num_data=num_data,
        kl_weight=kl_weight,
        scale=scale,
        prior_precision=prior_precision,
        prior=prior,
        penalty=penalty,
        damping=settings["damping"],
        counted_damping=counted_damping,
        noise_damping=noise_damping,
        relative_noise=settings.get("relative_noise"),
        noise_flatness=settings.get("noise_flatness") or FLATNESS,
        stated_prior=stated_prior,
        stated_damping=stated_prior + noise_damping,
    )
