"""From the user's optimizer to a noisy one: groups, learning rates, schedulers and weight decay carry over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_bayes.errors import UnsupportedTrainingError

_NO_LENGTH = (torch.optim.Adadelta, torch.optim.Rprop)  # their learning rate is not the length of a step
_GRADIENT_STEPS = (torch.optim.SGD, torch.optim.ASGD)


def check_swappable(optimizers: list[Optimizer], explicit_lr: bool) -> Optimizer:
    """Require one ordinary first-order optimizer.

    Args:
        optimizers: What `configure_optimizers` returned.
        explicit_lr: Whether the callback has a learning rate of its own.

    Returns:
        The optimizer to swap.

    Raises:
        UnsupportedTrainingError: If it cannot be swapped.
    """
    names = ", ".join(type(o).__name__ for o in optimizers) or "none"
    if len(optimizers) != 1 or not any(group["params"] for group in optimizers[0].param_groups):
        raise UnsupportedTrainingError(
            f"The callback swaps one optimizer, and configure_optimizers returned {names}. Return one optimizer over the "
            "parameters to learn."
        )
    old = optimizers[0]
    if isinstance(old, torch.optim.LBFGS):
        raise UnsupportedTrainingError(
            "LBFGS calls its closure several times per step, which noise makes meaningless. Return Adam, AdamW or SGD from "
            "configure_optimizers."
        )
    if isinstance(old, _NO_LENGTH) and not explicit_lr:
        raise UnsupportedTrainingError(
            f"The learning rate of {type(old).__name__} is not the length of a step, so it cannot bound VOGN's. Pass "
            "lr=... to the callback, or return Adam, AdamW or SGD."
        )
    if any(group.get("maximize") for group in old.param_groups):
        raise UnsupportedTrainingError("maximize=True: a posterior needs a negative log-likelihood to minimise.")
    return old


def converted_groups(old: Optimizer, lr: float | None, cycles_momentum: bool) -> list[dict[str, Any]]:
    """Parameter groups for the new optimizer.

    Kept are the learning rate and every key that schedulers or the user added (``initial_lr``, ``max_lr``, ``name``).
    Decoupled weight decay (AdamW) stays what it is; an L2 penalty becomes ``l2_penalty``, which fixes the prior precision
    once N is known.

    Args:
        old: The user's optimizer.
        lr: Learning rate that overrides the user's.
        cycles_momentum: Whether a scheduler will write to ``momentum``.

    Returns:
        The groups.
    """
    return [_converted(old, group, lr, cycles_momentum) for group in old.param_groups]


def _converted(old: Optimizer, group: dict[str, Any], lr: float | None, cycles_momentum: bool) -> dict[str, Any]:
    added = {key: value for key, value in group.items() if key not in old.defaults and key != "param_names"}
    decoupled = isinstance(old, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    decay = float(group.get("weight_decay") or 0.0)
    is_sgd = isinstance(old, _GRADIENT_STEPS)
    keeps_momentum = is_sgd or (cycles_momentum and "momentum" in group)
    return {
        **added,
        "params": list(group["params"]),
        "lr": float(group["lr"] if lr is None else lr),
        "radius": "sgd" if is_sgd else "adam",
        "momentum": float(group.get("momentum") or 0.0) if keeps_momentum else 0.0,
        "weight_decay": decay if decoupled else 0.0,
        "l2_penalty": 0.0 if decoupled else decay,
    }


def rebind_schedulers(schedulers: Iterable[Any], old: Optimizer, new: Optimizer) -> None:
    """Point schedulers, and the schedulers that they hold, from `old` to `new`.

    Args:
        schedulers: Learning-rate schedulers.
        old: The optimizer they were built for.
        new: The optimizer they shall drive.
    """
    stack, seen = list(schedulers), set()
    while stack:
        scheduler = stack.pop()
        if id(scheduler) in seen:
            continue
        seen.add(id(scheduler))
        if getattr(scheduler, "optimizer", None) is old:
            scheduler.optimizer = new
        inner = [value for value in vars(scheduler).values() if isinstance(value, LRScheduler)]
        stack += [*inner, *getattr(scheduler, "_schedulers", [])]
