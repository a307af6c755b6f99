"""Replaces the user's optimizer by a noisy one; groups, learning rates, schedulers and weight decay carry over."""

from __future__ import annotations

import os

from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.callbacks import checks
from lightning_bayes.callbacks.default_policy import ChosenDefaults
from lightning_bayes.callbacks.fields import CallbackArguments
from lightning_bayes.callbacks.num_data import with_augmentation_factor
from lightning_bayes.callbacks.param_groups import converted_defaults, converted_groups, without_penalty
from lightning_bayes.callbacks.resumable import require_resumable
from lightning_bayes.callbacks.schedulers import cycles_momentum, override_rates, rebind_schedulers
from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.optim.readout import load_posterior


def swap_optimizer(
    trainer: Trainer, module: LightningModule, arguments: CallbackArguments, chosen: ChosenDefaults
) -> MeanFieldOptimizer:
    """Replace the optimizer that the strategy has set up.

    Args:
        trainer: A trainer whose strategy has set up the user's optimizer. Its optimizer and schedulers are changed.
        module: The user's module.
        arguments: The callback's arguments.
        chosen: Values for the arguments that the user did not pass.

    Returns:
        The new optimizer.
    """
    strategy = trainer.strategy
    step_rule = arguments.group_defaults["step_rule"]
    has_base = step_rule == "user"
    old = checks.check_swappable(strategy.optimizers, module, bounds_step=step_rule == "trust_region")
    schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
    cycles = cycles_momentum(schedulers)
    groups = converted_groups(old, arguments.group_defaults["betas"], cycles)
    defaults = converted_defaults(old)
    if arguments.lr is not None:
        override_rates(groups, schedulers, arguments.lr)
    chosen.prior.mark([*groups, defaults])
    kwargs = dict(arguments.optimizer_kwargs)
    if isinstance(kwargs["prior"], (str, os.PathLike)):
        kwargs["prior"] = load_posterior(kwargs["prior"])
    if has_base:
        require_resumable(old)
        kwargs["base"] = without_penalty(old, cycles, chosen.grafts)
    new = arguments.optimizer_class(
        module,
        groups,
        lr=groups[0]["lr"],
        prior_precision=chosen.prior.first(has_base),
        **{key: defaults[key] for key in ("radius", "momentum", "weight_decay")},
        **with_augmentation_factor(arguments.group_defaults, trainer),
        **kwargs,
    )
    new.defaults |= {key: defaults[key] for key in ("l2_penalty", "prior_on_mean")}
    new.closure_opens_passes = True
    rebind_schedulers(schedulers, old, new)
    strategy.optimizers = [new]
    return new
