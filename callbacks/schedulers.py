"""Transfers the user's learning-rate schedulers to another optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim import Schedule
from lightning_bayes.private_torch import INNER_SCHEDULERS, LAST_RATES

_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # group entries that schedulers read
_SCHEDULER_RATES = ("base_lrs", "max_lrs", LAST_RATES)


def override_rates(groups: list[dict[str, Any]], schedulers: Iterable[Any], lr: float | Schedule) -> None:
    """Make `lr` the peak of every group's schedule, and keep the schedule's shape.

    Schedulers compute learning rates from the initial rates, so changing only the current rate would not last beyond their
    next step.

    Args:
        groups: Converted groups; changed in place.
        schedulers: The user's schedulers; changed in place.
        lr: Learning rate, or a schedule. A schedule raises UnsupportedTrainingError if the user has schedulers as well.
    """
    if callable(lr):
        _set_schedule(groups, list(schedulers), lr)
        return
    all_schedulers = list(_with_inner(schedulers))
    cyclic = [scheduler.max_lrs for scheduler in all_schedulers if hasattr(scheduler, "max_lrs")]
    factors = []
    for index, group in enumerate(groups):
        start = group.get("initial_lr", group["lr"])
        peak = max([group.get("max_lr", start), *(rates[index] for rates in cyclic)])
        factors.append(lr / peak if peak else 1.0)
        group.update({key: group[key] * factors[-1] for key in _GROUP_RATES if key in group})
        if not peak:
            group["lr"] = lr
    for scheduler in all_schedulers:
        for name in _SCHEDULER_RATES:
            if hasattr(scheduler, name):
                rates = [rate * factor for rate, factor in zip(getattr(scheduler, name), factors, strict=True)]
                setattr(scheduler, name, rates)


def _set_schedule(groups: list[dict[str, Any]], schedulers: list[Any], lr: Schedule) -> None:
    if schedulers:
        raise UnsupportedTrainingError(
            f"lr={lr!r} is a schedule, and configure_optimizers returns {type(schedulers[0]).__name__}, so both would set "
            "the learning rate. Keep one of them."
        )
    for group in groups:
        group["lr"] = lr


def cycles_momentum(schedulers: Iterable[Any]) -> bool:
    """Whether a learning-rate scheduler, or an inner one, changes the momentum, as OneCycleLR does."""
    return any(getattr(scheduler, "cycle_momentum", False) for scheduler in _with_inner(schedulers))


def rebind_schedulers(schedulers: Iterable[Any], old: Optimizer, new: Optimizer) -> None:
    """Point schedulers, and their inner schedulers, from the optimizer `old` to `new`."""
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
