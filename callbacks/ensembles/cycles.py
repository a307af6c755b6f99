"""Cyclic learning rates: warm-up, then half-cosines from a peak to zero, one per mode (Huang et al. 2017).

https://arxiv.org/abs/1704.00109
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from lightning_bayes.callbacks.fit.schedulers import peak_rates
from lightning_bayes.errors import UnsupportedTrainingError

WARM_UP: Final = 0.3  # fraction of the first cycle, and that of OneCycleLR's default
RESTART: Final = 0.05  # of a later cycle


def cycle_ends(updates: int, count: int, first: float) -> tuple[int, ...]:
    """The update after which each of `count` cycles ends; the first takes the fraction `first` of all updates."""
    later = (1 - first) / (count - 1) if count > 1 else 0.0
    return (*(round(updates * (first + later * index)) for index in range(count - 1)), updates)


def rate_at(update: int, ends: Sequence[int]) -> float:
    """The learning rate of update number `update`, counted from 0, relative to the peak; 0 after the last cycle."""
    start = 0
    for index, end in enumerate(ends):
        if update < end:
            return _rate_in_cycle((update + 0.5 - start) / (end - start), WARM_UP if index == 0 else RESTART)
        start = end
    return 0.0


def _rate_in_cycle(done: float, warm_up: float) -> float:
    """A line from 0 to 1 in the fraction `warm_up` of a cycle, then a half-cosine to 0."""
    if done < warm_up:
        return done / warm_up
    return 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))


class CyclicRates:
    """Sets the learning rate and the momentum of an optimizer's groups in place of the user's schedule.

    Attributes:
        peaks: The largest learning rate of the user's schedule, per group.
    """

    def __init__(self, peak: float) -> None:
        self.peak, self.peaks = peak, list[float]()

    def set(self, optimizer: Any, schedulers: Sequence[Any], relative: float) -> None:
        """Set each group's rate to `relative` times its peak."""
        new = len(optimizer.param_groups) > len(self.peaks)
        if new:  # at the start, and when a callback such as BackboneFinetuning adds a group
            _require_numbers(optimizer)
            self.peaks += map(float, peak_rates(optimizer.param_groups, schedulers)[len(self.peaks) :])
        for group, peak in zip(optimizer.param_groups, self.peaks, strict=False):
            _set_rate(group, relative * self.peak * peak)
            if "max_momentum" in group:  # OneCycleLR and CyclicLR lower the momentum where the rate is high
                _set_momentum(
                    group, group["max_momentum"] - relative * (group["max_momentum"] - group["base_momentum"])
                )


def _require_numbers(optimizer: Any) -> None:
    """Refuse an optimizer without a learning rate to multiply."""
    wrong = [rate for rate in (group["lr"] for group in optimizer.param_groups) if rate is None or callable(rate)]
    if wrong:
        raise UnsupportedTrainingError(
            f"{type(optimizer).__name__} has lr={wrong[0]!r}, and cycles need a number to start from. Pass a learning rate, "
            "such as lr=1e-3."
        )


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])
    else:
        group["momentum"] = momentum
