"""Replaces the user's optimizer by a noisy one; groups, learning rates, schedulers and weight decay carry over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.callbacks import checks
from lightning_bayes.callbacks.default_policy import ChosenDefaults, DefaultPrior
from lightning_bayes.callbacks.num_data import with_augmentation_factor
from lightning_bayes.callbacks.param_groups import converted_defaults, converted_groups, without_penalty
from lightning_bayes.callbacks.resumable import require_resumable
from lightning_bayes.callbacks.schedulers import cycles_momentum, override_rates, rebind_schedulers
from lightning_bayes.optim import MeanFieldOptimizer, Schedule
from lightning_bayes.optim.readout import load_posterior


class SwapSettings(NamedTuple):
    """A callback's arguments, which build the new optimizer."""

    optimizer_class: type[MeanFieldOptimizer]
    lr: float | Schedule | None  # None: the user's optimizer updates the mean, or its learning rate bounds the step
    num_data: int | None
    prior: DefaultPrior
    group_defaults: Mapping[str, Any]  # hyperparameters of every group
    optimizer_kwargs: Mapping[str, Any]  # the other arguments of the optimizer
    defaults: ChosenDefaults


def swap_optimizer(trainer: Trainer, module: LightningModule, settings: SwapSettings) -> MeanFieldOptimizer:
    """Replace the optimizer that the strategy has set up.

    Args:
        trainer: A trainer whose strategy has set up the user's optimizer. Its optimizer and schedulers are changed.
        module: The user's module.
        settings: The optimizer to build.

    Returns:
        The new optimizer.
    """
    strategy = trainer.strategy
    has_base = settings.group_defaults["step_rule"] == "user"
    bounds_step = settings.group_defaults["step_rule"] == "trust_region"
    old = checks.check_swappable(strategy.optimizers, module, bounds_step)
    schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
    cycles = cycles_momentum(schedulers)
    groups = converted_groups(old, settings.group_defaults["betas"], cycles)
    defaults = converted_defaults(old)
    if settings.lr is not None:
        override_rates(groups, schedulers, settings.lr)
    settings.prior.mark([*groups, defaults])
    kwargs = dict(settings.optimizer_kwargs)
    if isinstance(kwargs["prior"], (str, os.PathLike)):
        kwargs["prior"] = load_posterior(kwargs["prior"])
    if has_base:
        require_resumable(old)
        kwargs["base"] = without_penalty(old, cycles, settings.defaults.grafts)
    new = settings.optimizer_class(
        module,
        groups,
        lr=groups[0]["lr"],
        prior_precision=settings.prior.first(has_base),
        **{key: defaults[key] for key in ("radius", "momentum", "weight_decay")},
        **with_augmentation_factor(settings.group_defaults, trainer),
        **kwargs,
    )
    new.defaults |= {key: defaults[key] for key in ("l2_penalty", "prior_on_mean")}
    new.closure_opens_passes = True
    rebind_schedulers(schedulers, old, new)
    strategy.optimizers = [new]
    return new
