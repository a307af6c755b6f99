"""Puts a noisy optimizer in the user's place. Both hold one list of parameter groups; see `optim.groups`."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.fit.fields import CallbackArguments
from lightning_bayes.callbacks.fit.num_data import with_augmentation_factor
from lightning_bayes.callbacks.fit.schedulers import override_rates
from lightning_bayes.callbacks.trainer import checks
from lightning_bayes.callbacks.trainer.patches import Patches
from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.optim.base_optimizer import GRADIENT_STEPS
from lightning_bayes.optim.kronecker.family import KroneckerFamily
from lightning_bayes.optim.readout import load_posterior
from lightning_bayes.private_torch import mark_as_scheduled


def swap_optimizer(
    trainer: Trainer, module: LightningModule, arguments: CallbackArguments, patches: Patches
) -> VariationalOptimizer:
    """Replace the optimizer that the strategy has set up; its groups gain the posterior's settings."""
    strategy, step_rule = trainer.strategy, arguments.group_defaults["step_rule"]
    user = checks.check_swappable(strategy.optimizers, module, step_rule)
    if arguments.lr is not None:
        override_rates(user, [config.scheduler for config in strategy.lr_scheduler_configs], arguments.lr)
    kwargs: dict[str, Any] = {**arguments.optimizer_kwargs, "base" if step_rule == "user" else "params": user}
    if isinstance(kwargs["prior"], (str, os.PathLike)):
        kwargs["prior"] = load_posterior(kwargs["prior"])
    if arguments.prior_precision is not None:
        kwargs["prior_precision"] = arguments.prior_precision
    optimizer = arguments.optimizer_class(
        module,
        radius="sgd" if isinstance(user, GRADIENT_STEPS) else "adam",
        **with_augmentation_factor(arguments.group_defaults, trainer),
        **kwargs,
    )
    checks.require_dense_gradients(optimizer)
    if isinstance(optimizer.family, KroneckerFamily):
        rank_zero_info(optimizer.family.describe())
    step = partial(optimizer.step, closure_opens_passes=True)
    mark_as_scheduled(step)
    for each in (optimizer, user):
        patches.set(each, "step", step)
    for config in strategy.lr_scheduler_configs:
        patches.set(config.scheduler, "optimizer", optimizer)
    strategy.optimizers = [optimizer]
    return optimizer
