"""Methods with several kinds of steps, such as K-FAC, which measures every T_stats updates and inverts every T_inv.

Each round times every kind of step. The mean step over T_inv updates is computed from them:

    t = plain + (statistics - plain) / T_stats + (inversion - plain) / T_inv

where the inversion step inverts all layers at once; in training, layers take turns over the T_inv updates. Each kind has a
separate model and optimizer, because new inverses make the next sample more expensive. Plain steps share draws, so a plain
step is timed as the mean of ten.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.speed.models import Task
from benchmarks.speed.rounds import MeanOfUpdates, Step, Times
from benchmarks.speed.update import update_once
from lightning_bayes import KFACCallback, NoisyKFACCallback
from lightning_bayes.errors import NonFiniteError
from lightning_bayes.optim import KFAC, NoisyKFAC
from lightning_bayes.optim.runtime.measuring import FIRST_UPDATES

NEVER = 2**40
SHARED = 10  # updates per timing of a plain step; antithetic pairs share draws
SEPARATOR = ": "


class Intervals(NamedTuple):
    """Updates between measurements and between inversions."""

    stats: int  # T_stats
    inverse: int  # T_inv

    @classmethod
    def of(cls, method: str) -> Intervals:
        """The default intervals of the callback of ``"kfac"``, ``"noisy_kfac-natural"`` or another Noisy K-FAC."""
        lr = 1e-3 if method.endswith("-natural") else None
        callback = NoisyKFACCallback(lr=lr) if method.startswith("noisy") else KFACCallback()
        return cls(callback.optimizer_kwargs["stats_interval"], callback.optimizer_kwargs["inverse_interval"])


class Cycle(NamedTuple):
    """The kinds of steps of a method. A call runs a plain step; the first call also measures and inverts.

    Attributes:
        plain: Steps without measurement or inversion.
        statistics: A step with a measurement.
        inversion: A step with the inversion of every layer.
        sampling: Only the weight sampling that all these steps contain.
    """

    plain: MeanOfUpdates
    statistics: Step
    inversion: Step
    sampling: MeanOfUpdates

    def __call__(self) -> None:
        """Run a plain step."""
        self.plain.update()


def kronecker_cycle(task: Task, make: Callable[[Task], KFAC | NoisyKFAC]) -> Cycle:
    """Build the cycle of K-FAC or Noisy K-FAC.

    Args:
        task: Model and batch.
        make: Builds the optimizer of a task. Its intervals are then set for each kind of step.

    Returns:
        The cycle.
    """

    def kind(kind_task: Task, stats_interval: int, inverse_interval: int) -> tuple[KFAC | NoisyKFAC, Step]:
        optimizer = make(kind_task)

        def run() -> None:
            optimizer.family.stats_interval, optimizer.family.inverse_interval = stats_interval, inverse_interval
            for state in optimizer.state.values():
                state["measurements"] = NEVER + 1  # otherwise it would also invert at measurements 1, 2, 4, 8, …
            update_once(optimizer, kind_task)
            for group in optimizer.param_groups:
                group["step"] = max(FIRST_UPDATES, group["step"])  # later plain passes run the bare model
            if optimizer.skipped_in_a_row:  # a skipped step takes less time
                raise NonFiniteError("A step was skipped for a non-finite gradient or curvature.")

        return optimizer, run

    optimizer, plain = kind(task, NEVER, NEVER)

    def sample() -> None:
        for group in optimizer.param_groups:
            group["step"] += 1  # otherwise the next sample would repeat this one
        with torch.no_grad(), optimizer.sampled_params(0):
            pass

    _, measuring = kind(_copy(task), 1, NEVER)
    _, inverting = kind(_copy(task), NEVER, 1)
    return Cycle(MeanOfUpdates(plain, SHARED), measuring, inverting, MeanOfUpdates(sample, SHARED))


def _copy(task: Task) -> Task:
    return replace(task, model=copy.deepcopy(task.model))


def expand(steps: dict[str, Step]) -> dict[str, Step]:
    """Replace every cycle by its kinds of steps, named ``METHOD: KIND``."""
    expanded: dict[str, Step] = {}
    for method, step in steps.items():
        if isinstance(step, Cycle):
            expanded |= {f"{method}{SEPARATOR}{kind}": kind_step for kind, kind_step in step._asdict().items()}
        else:
            expanded[method] = step
    return expanded


def combine(times: Times, methods: list[str]) -> dict[str, dict[str, float]]:
    """Compute the mean steps of cycles from the kinds of their steps.

    Args:
        times: Times by the names from `expand`; mean steps and failures of cycles are added under the method's name.
        methods: All methods.

    Returns:
        For every cycle, the fractions of statistics, inversion and sampling in its mean step, medians over rounds.
    """
    shares: dict[str, dict[str, float]] = {}
    for method in methods:
        names = [f"{method}{SEPARATOR}{kind}" for kind in Cycle._fields]
        failures = [times.failures[name] for name in names if name in times.failures]
        if failures:
            times.failures[method] = failures[0]
        elif names[0] in times.seconds:
            shares[method] = _combine_rounds(times, method, names)
    return shares


def _combine_rounds(times: Times, method: str, names: list[str]) -> dict[str, float]:
    intervals = Intervals.of(method)
    kinds = [times.seconds[name] for name in names]
    times.seconds[method] = {}
    parts: dict[str, list[float]] = {"statistics": [], "inversion": [], "sampling": []}
    for r in sorted(set.intersection(*map(set, kinds))):
        plain, measuring, inverting, sampling = (seconds[r] for seconds in kinds)
        measured = (measuring - plain) / intervals.stats
        inverted = (inverting - plain) / intervals.inverse
        total = plain + measured + inverted
        times.seconds[method][r] = total
        for part, seconds in zip(parts.values(), (measured, inverted, sampling), strict=True):
            part.append(seconds / total)
    return {name: statistics.median(values) for name, values in parts.items()}
