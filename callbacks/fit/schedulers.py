"""An explicit learning rate under the user's schedulers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim import Schedule
from lightning_bayes.optim.base_optimizer import decay_kind
from lightning_bayes.private_torch import INNER_SCHEDULERS, LAST_RATES

_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # group entries that schedulers read
_SCHEDULER_RATES = ("base_lrs", "max_lrs", LAST_RATES)


def override_rates(optimizer: Optimizer, schedulers: Sequence[Any], lr: float | Schedule) -> None:
    """Make `lr` the peak of every group's schedule; its shape, and the decay of a step that decouples it, stay."""
    groups = optimizer.param_groups
    if callable(lr):
        if schedulers:
            raise UnsupportedTrainingError(
                f"lr={lr!r} is a schedule, and configure_optimizers returns {type(schedulers[0]).__name__}, so both would "
                "set the learning rate. Keep one of them."
            )
        for group in groups:
            group["lr"] = lr
        return
    all_schedulers = list(_with_inner(schedulers))
    if any(getattr(scheduler, "cycle_momentum", False) for scheduler in all_schedulers):
        rank_zero_warn(
            f"The scheduler cycles the momentum of {type(optimizer).__name__}, which takes no step with lr={lr:g}; the "
            "callback's betas stay. Pass cycle_momentum=False to the scheduler."
        )
    factors = []
    for group, peak in zip(groups, peak_rates(groups, schedulers), strict=True):
        factors.append(lr / peak if peak else 1.0)
        group.update({key: group[key] * factors[-1] for key in _GROUP_RATES if key in group})
        if group.get("weight_decay") and decay_kind(optimizer, group, states_precision=False) != "prior":
            group["weight_decay"] /= factors[-1] or 1.0  # α·wd stays: IVON's α may be a thousand times AdamW's
        if not peak:
            group["lr"] = lr
    for scheduler in all_schedulers:
        for name in _SCHEDULER_RATES:
            if hasattr(scheduler, name):
                rates = [rate * factor for rate, factor in zip(getattr(scheduler, name), factors, strict=True)]
                setattr(scheduler, name, rates)


def peak_rates(groups: Sequence[dict[str, Any]], schedulers: Sequence[Any]) -> list[float]:
    """The largest learning rate that the user's schedule states for each group."""
    cyclic = [scheduler.max_lrs for scheduler in _with_inner(schedulers) if hasattr(scheduler, "max_lrs")]
    stated = [group.get("max_lr", group.get("initial_lr", group["lr"])) for group in groups]
    return [max([rate, *(rates[index] for rates in cyclic if index < len(rates))]) for index, rate in enumerate(stated)]


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
