"""Replaces the user's optimizer by a noisy one; groups, learning rates, schedulers and weight decay carry over."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from lightning_bayes.callbacks import checks
from lightning_bayes.callbacks.default_policy import ChosenDefaults
from lightning_bayes.callbacks.num_data import with_augmentation_factor
from lightning_bayes.callbacks.resumable import require_resumable
from lightning_bayes.callbacks.schedulers import cycles_momentum, override_rates, rebind_schedulers
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim import BetaSchedule, VariationalOptimizer
from lightning_bayes.optim.readout import load_posterior
from lightning_bayes.optim.steps.base_optimizer import GRADIENT_STEPS, BaseOptimizerStep

_DECOUPLED_NAMES = ("AdamW", "Adafactor", "Muon")  # Muon needs torch 2.9
_DECOUPLED = tuple(getattr(torch.optim, name) for name in _DECOUPLED_NAMES if hasattr(torch.optim, name))


def swap_optimizer(trainer: Trainer, module: LightningModule, chosen: ChosenDefaults) -> VariationalOptimizer:
    """Replace the optimizer that the strategy has set up; changes the user's optimizer and schedulers."""
    strategy, arguments = trainer.strategy, chosen.arguments
    step_rule = arguments.group_defaults["step_rule"]
    has_base = step_rule == "user"
    old = checks.check_swappable(strategy.optimizers, module, bounds_step=step_rule == "trust_region")
    schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
    cycles = cycles_momentum(schedulers)
    groups = _converted_groups(old, arguments.group_defaults["betas"], cycles)
    defaults = _converted(old, old.defaults, False)  # which groups added later inherit
    if arguments.lr is not None:
        override_rates(groups, schedulers, arguments.lr)
    chosen.prior.mark([*groups, defaults])
    kwargs = dict(arguments.optimizer_kwargs)
    if isinstance(kwargs["prior"], (str, os.PathLike)):
        kwargs["prior"] = load_posterior(kwargs["prior"])
    if has_base:
        require_resumable(old)
        kwargs["base"] = _without_penalty(old, cycles, chosen.grafts)
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


def _converted_groups(
    old: Optimizer, betas: tuple[float, float] | BetaSchedule, cycles_momentum: bool
) -> list[dict[str, Any]]:
    """The groups with their rates, added keys and decoupled decay; an L2 penalty becomes ``l2_penalty``, for the prior."""
    groups = []
    for group in old.param_groups:
        groups.append(_converted(old, group, cycles_momentum) | {"params": list(group["params"])})
        if cycles_momentum and "betas" in group:
            if callable(betas):
                raise UnsupportedTrainingError(
                    f"betas={betas!r} is a schedule, and a scheduler from configure_optimizers cycles the momentum, so both "
                    "would set β₁. Keep one of them; OneCycleLR and CyclicLR accept cycle_momentum=False."
                )
            groups[-1]["betas"] = (group["betas"][0], betas[1])  # the schedule's first β₁
    return groups


def _converted(old: Optimizer, group: dict[str, Any], cycles_momentum: bool) -> dict[str, Any]:
    added = {key: value for key, value in group.items() if key not in old.defaults and key != "param_names"}
    decoupled = _is_decoupled(old, group)
    decay = float(group.get("weight_decay") or 0.0)
    is_sgd = isinstance(old, GRADIENT_STEPS)
    keeps_momentum = is_sgd or (cycles_momentum and "momentum" in group)
    return {
        **added,
        "lr": float(group["lr"]),
        "radius": "sgd" if is_sgd else "adam",
        "momentum": float(group.get("momentum") or 0.0) if keeps_momentum else 0.0,
        "weight_decay": decay if decoupled else 0.0,
        "l2_penalty": 0.0 if decoupled else decay,
    }


def _without_penalty(old: Optimizer, cycles_momentum: bool, grafts: bool) -> BaseOptimizerStep:
    """Let the user's optimizer update the mean, without its L2 penalty, which the prior replaces."""
    for group in (old.defaults, *old.param_groups):
        if not _is_decoupled(old, group) and "weight_decay" in group:
            group["weight_decay"] = 0.0
    return BaseOptimizerStep(old, cycles_momentum, grafts)


def _is_decoupled(old: Optimizer, group: dict[str, Any]) -> bool:
    return isinstance(old, _DECOUPLED) or bool(group.get("decoupled_weight_decay"))
