"""From the user's optimizer to a noisy one: groups, learning rates, schedulers and weight decay carry over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim import BetaSchedule, NoisyOptimizer, Schedule
from lightning_bayes.optim.steps.base_optimizer import GRADIENT_STEPS, BaseOptimizerStep

_NO_LENGTH = (torch.optim.Adadelta, torch.optim.Rprop)  # their learning rate is not the length of a step
_NAMES_OF_DECOUPLED = ("AdamW", "Adafactor", "Muon")  # the last came with torch 2.9
_DECOUPLED = tuple(getattr(torch.optim, name) for name in _NAMES_OF_DECOUPLED if hasattr(torch.optim, name))
_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")  # what schedulers read from groups
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


def check_swappable(optimizers: list[Optimizer], module: nn.Module, explicit_lr: bool) -> Optimizer:
    """Require one ordinary first-order optimizer of parameters of `module`.

    Args:
        optimizers: What `configure_optimizers` returned.
        module: The user's module.
        explicit_lr: Whether the callback has a learning rate of its own.

    Returns:
        The optimizer to swap.

    Raises:
        UnsupportedTrainingError: If it cannot be swapped.
    """
    names = ", ".join(type(o).__name__ for o in optimizers if o.param_groups) or "None"  # Lightning's stand-in is empty
    if len(optimizers) != 1 or not optimizers[0].param_groups:
        raise UnsupportedTrainingError(
            f"The callback swaps one optimizer, and configure_optimizers returned {names}. Return one optimizer over the "
            "parameters to learn."
        )
    old = optimizers[0]
    _check_params(old, module)
    if isinstance(old, NoisyOptimizer):
        raise UnsupportedTrainingError(
            f"The optimizer is {type(old).__name__} already, from configure_optimizers or from a second callback. Return "
            "Adam, AdamW or SGD from configure_optimizers and use one callback, or train with it and without callback."
        )
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


def _check_params(old: Optimizer, module: nn.Module) -> None:
    params, own = [p for group in old.param_groups for p in group["params"]], set(module.parameters())
    foreign = [tuple(p.shape) for p in params if p not in own]
    if foreign:
        raise UnsupportedTrainingError(
            f"The optimizer holds parameters that {type(module).__name__} does not, of the shapes {foreign}, so no pass of "
            "the module is measured for them. Make what holds them a submodule of it."
        )
    if not any(p.requires_grad for p in params):
        raise UnsupportedTrainingError(
            f"{type(module).__name__} has no trainable parameter in its optimizer. Set requires_grad_(True) on what should "
            "be learned."
        )


def converted_groups(
    old: Optimizer, betas: tuple[float, float] | BetaSchedule, cycles_momentum: bool
) -> list[dict[str, Any]]:
    """Parameter groups for the new optimizer.

    Kept are the learning rate and every key that schedulers or the user added (``initial_lr``, ``max_lr``, ``name``).
    Decoupled weight decay (AdamW and its kin) stays what it is; an L2 penalty becomes ``l2_penalty``, which fixes the
    prior precision once N is known.

    Args:
        old: The user's optimizer.
        betas: The new optimizer's (β₁, β₂).
        cycles_momentum: Whether a scheduler writes to ``momentum`` or to β₁, see `cycles_momentum`.

    Returns:
        The groups.

    Raises:
        UnsupportedTrainingError: If `betas` is a function and a scheduler writes to β₁ as well.
    """
    groups = []
    for group in old.param_groups:
        groups.append(_converted(old, group, cycles_momentum) | {"params": list(group["params"])})
        if cycles_momentum and "betas" in group:
            if callable(betas):
                raise UnsupportedTrainingError(
                    f"betas={betas!r} is a schedule, and a scheduler of configure_optimizers cycles the momentum: two would "
                    "write β₁. Keep one of them; OneCycleLR and CyclicLR take cycle_momentum=False."
                )
            groups[-1]["betas"] = (group["betas"][0], betas[1])  # the schedule's first β₁
    return groups


def converted_defaults(old: Optimizer) -> dict[str, Any]:
    """What groups added later inherit of the user's optimizer, as `converted_groups`.

    Args:
        old: The user's optimizer.

    Returns:
        The values.
    """
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


def without_penalty(old: Optimizer, cycles_momentum: bool) -> BaseOptimizerStep:
    """Let the user's optimizer move the means, without the L2 penalty that the prior stands for.

    Args:
        old: The user's optimizer; changed in place.
        cycles_momentum: Whether a scheduler changes the momentum.

    Returns:
        The step.
    """
    for group in (old.defaults, *old.param_groups):
        if not _is_decoupled(old, group) and "weight_decay" in group:
            group["weight_decay"] = 0.0
    return BaseOptimizerStep(old, cycles_momentum)


def _is_decoupled(old: Optimizer, group: dict[str, Any]) -> bool:
    return isinstance(old, _DECOUPLED) or bool(group.get("decoupled_weight_decay"))


def override_rates(groups: list[dict[str, Any]], schedulers: Iterable[Any], lr: float | Schedule) -> None:
    """Make `lr` the peak of every group's schedule, which keeps its shape.

    Schedulers compute learning rates from those the optimizer started with, so setting the current one alone would last
    until their next step.

    Args:
        groups: Converted groups; changed in place.
        schedulers: The user's schedulers; changed in place.
        lr: Learning rate; a function of the step takes the place of schedulers.
    """
    if callable(lr):
        _take_function(groups, list(schedulers), lr)
        return
    every = list(_with_inner(schedulers))
    cyclic = [scheduler.max_lrs for scheduler in every if hasattr(scheduler, "max_lrs")]
    factors = []
    for index, group in enumerate(groups):
        start = group.get("initial_lr", group["lr"])
        peak = max([group.get("max_lr", start), *(rates[index] for rates in cyclic)])
        factors.append(lr / peak if peak else 1.0)
        group.update({key: group[key] * factors[-1] for key in _RATES_OF_GROUPS if key in group})
        group["lr"] = group["lr"] if peak else lr
    for scheduler in every:
        for name in _RATES_OF_SCHEDULERS:
            if hasattr(scheduler, name):
                rates = [rate * factor for rate, factor in zip(getattr(scheduler, name), factors, strict=True)]
                setattr(scheduler, name, rates)


def _take_function(groups: list[dict[str, Any]], schedulers: list[Any], lr: Schedule) -> None:
    if schedulers:
        raise UnsupportedTrainingError(
            f"lr={lr!r} is a schedule, and configure_optimizers returns {type(schedulers[0]).__name__}: two would write the "
            "learning rate. Keep one of them."
        )
    for group in groups:
        group["lr"] = lr


def cycles_momentum(schedulers: Iterable[Any]) -> bool:
    """Whether a scheduler writes to the momentum, as OneCycleLR does.

    Args:
        schedulers: Learning-rate schedulers.

    Returns:
        Whether one of them, or of those that they hold, does.
    """
    return any(getattr(scheduler, "cycle_momentum", False) for scheduler in _with_inner(schedulers))


def rebind_schedulers(schedulers: Iterable[Any], old: Optimizer, new: Optimizer) -> None:
    """Point schedulers, and the schedulers that they hold, from `old` to `new`.

    Args:
        schedulers: Learning-rate schedulers.
        old: The optimizer they were built for.
        new: The optimizer they shall drive.
    """
    for scheduler in _with_inner(schedulers):
        if getattr(scheduler, "optimizer", None) is old:
            scheduler.optimizer = new


def _with_inner(schedulers: Iterable[Any]) -> Iterator[Any]:
    stack, seen = list(schedulers), set()
    while stack:
        scheduler = stack.pop()
        if id(scheduler) in seen:
            continue
        seen.add(id(scheduler))
        yield scheduler
        inner = [value for value in vars(scheduler).values() if isinstance(value, LRScheduler)]
        stack += [*inner, *getattr(scheduler, "_schedulers", [])]
