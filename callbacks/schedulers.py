"""The user's learning-rate schedulers, carried over to another optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim import Schedule
from lightning_bayes.private_torch import INNER_SCHEDULERS, LAST_RATES

_RATES_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")  # what schedulers read from groups
_RATES_OF_SCHEDULERS = ("base_lrs", "max_lrs", LAST_RATES)


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
        new: The optimizer they are to drive.
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
        stack += [*inner, *getattr(scheduler, INNER_SCHEDULERS, [])]
