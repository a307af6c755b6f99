"""Converts the user's parameter groups to groups of a noisy optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim import BetaSchedule
from lightning_bayes.optim.steps.base_optimizer import GRADIENT_STEPS, BaseOptimizerStep

_DECOUPLED_NAMES = ("AdamW", "Adafactor", "Muon")  # Muon needs torch 2.9
_DECOUPLED = tuple(getattr(torch.optim, name) for name in _DECOUPLED_NAMES if hasattr(torch.optim, name))


def converted_groups(
    old: Optimizer, betas: tuple[float, float] | BetaSchedule, cycles_momentum: bool
) -> list[dict[str, Any]]:
    """Build parameter groups for the new optimizer.

    The learning rate and all keys that schedulers or the user added (``initial_lr``, ``max_lr``, ``name``) are kept.
    Decoupled weight decay, as in AdamW, is kept too. An L2 penalty becomes ``l2_penalty``, which sets the prior precision
    once N is known.

    Args:
        old: The user's optimizer.
        betas: The new optimizer's (β₁, β₂).
        cycles_momentum: Whether a scheduler changes ``momentum`` or β₁, see `schedulers.cycles_momentum`.

    Returns:
        The groups.

    Raises:
        UnsupportedTrainingError: If `betas` is a schedule and a scheduler changes β₁ as well.
    """
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


def converted_defaults(old: Optimizer) -> dict[str, Any]:
    """Convert the defaults of the user's optimizer, which groups added later inherit."""
    return _converted(old, old.defaults, False)


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


def without_penalty(old: Optimizer, cycles_momentum: bool, grafts: bool) -> BaseOptimizerStep:
    """Let the user's optimizer update the mean, without its L2 penalty, which the prior replaces.

    Args:
        old: The user's optimizer; changed in place.
        cycles_momentum: Whether a scheduler changes the momentum.
        grafts: Whether to step along the natural gradient, with the length of the user's step.

    Returns:
        The step.
    """
    for group in (old.defaults, *old.param_groups):
        if not _is_decoupled(old, group) and "weight_decay" in group:
            group["weight_decay"] = 0.0
    return BaseOptimizerStep(old, cycles_momentum, grafts)


def _is_decoupled(old: Optimizer, group: dict[str, Any]) -> bool:
    return isinstance(old, _DECOUPLED) or bool(group.get("decoupled_weight_decay"))
