"""Methods whose steps are not alike, as K-FAC's: it measures every T_stats updates and inverts every T_inv.

Every kind of step is timed in every round, and the mean step of T_inv updates is put together from them:

    t = plain + (statistics - plain) / T_stats + (inversion - plain) / T_inv

where the step with inversion inverts all layers at once, which in training take turns over the T_inv updates. Each kind has
a model and an optimizer of its own, because new inverses cost the next sample too. Plain steps share draws, so theirs is the
mean of ten.
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
from lightning_bayes.optim import KroneckerOptimizer
from lightning_bayes.optim.runtime.measuring import FIRST

NEVER = 2**40
SHARED = 10  # updates; antithetic pairs share draws
SEPARATOR = ": "


class Intervals(NamedTuple):
    """Updates between measurements and between inversions."""

    stats: int  # T_stats
    inverse: int  # T_inv

    @classmethod
    def of(cls, method: str) -> Intervals:
        """The defaults of the callback of a method, ``"kfac"``, ``"noisy_kfac-natural"``, or another one of Noisy K-FAC."""
        lr = 1e-3 if method.endswith("-natural") else None
        callback = NoisyKFACCallback(lr=lr) if method.startswith("noisy") else KFACCallback()
        return cls(callback.optimizer_kwargs["stats_interval"], callback.optimizer_kwargs["inverse_interval"])


class Cycle(NamedTuple):
    """The kinds of steps of one method; a call is a plain step, and the first one measures and inverts as well.

    Attributes:
        plain: Steps without measurement or inversion.
        statistics: Step with measurement.
        inversion: Step with the inversion of every layer.
        sampling: The weight samples of steps alone, which all of the above contain.
    """

    plain: MeanOfUpdates
    statistics: Step
    inversion: Step
    sampling: MeanOfUpdates

    def __call__(self) -> None:
        """Take a plain step."""
        self.plain.update()


def kronecker_cycle(task: Task, make: Callable[[Task], KroneckerOptimizer]) -> Cycle:
    """The cycle of K-FAC or Noisy K-FAC.

    Args:
        task: Model and batch.
        make: Makes the optimizer of a task; its intervals are set for each kind of step.

    Returns:
        The cycle.
    """

    def kind(own: Task, stats_interval: int, inverse_interval: int) -> tuple[KroneckerOptimizer, Step]:
        optimizer = make(own)

        def run() -> None:
            optimizer.stats_interval, optimizer.inverse_interval = stats_interval, inverse_interval
            for state in optimizer.state.values():
                state["measurements"] = NEVER + 1  # at the measurements 1, 2, 4, 8, … it would invert too
            update_once(optimizer, own)
            for group in optimizer.param_groups:
                group["step"] = max(FIRST, group["step"])  # after which plain passes run the bare model
            if optimizer.skipped_in_a_row:  # which takes less time
                raise NonFiniteError("A step was skipped for a non-finite gradient or curvature.")

        return optimizer, run

    optimizer, plain = kind(task, NEVER, NEVER)

    def sample() -> None:
        for group in optimizer.param_groups:
            group["step"] += 1  # else the next sample is this one
        with torch.no_grad(), optimizer.sampled_params(0):
            pass

    _, measuring = kind(_copy(task), 1, NEVER)
    _, inverting = kind(_copy(task), NEVER, 1)
    return Cycle(MeanOfUpdates(plain, SHARED), measuring, inverting, MeanOfUpdates(sample, SHARED))


def _copy(task: Task) -> Task:
    return replace(task, model=copy.deepcopy(task.model))


def expand(steps: dict[str, Step]) -> dict[str, Step]:
    """Replace every cycle by its kinds of steps, under names of their own."""
    found: dict[str, Step] = {}
    for method, step in steps.items():
        kinds = step._asdict() if isinstance(step, Cycle) else None
        found |= {method: step} if kinds is None else {f"{method}{SEPARATOR}{k}": s for k, s in kinds.items()}
    return found


def combine(times: Times, methods: list[str]) -> dict[str, dict[str, float]]:
    """Put the mean steps of cycles together from their kinds.

    Args:
        times: Times by the names of `expand`; the mean steps and failures of cycles are added under the method's name.
        methods: All methods.

    Returns:
        For every cycle the shares of statistics, inversion and sampling in its mean step, medians over rounds.
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
    of_each = [times.seconds[name] for name in names]
    times.seconds[method] = {}
    parts: dict[str, list[float]] = {"statistics": [], "inversion": [], "sampling": []}
    for r in sorted(set.intersection(*map(set, of_each))):
        plain, measuring, inverting, sampling = (seconds[r] for seconds in of_each)
        measured = (measuring - plain) / intervals.stats
        inverted = (inverting - plain) / intervals.inverse
        total = plain + measured + inverted
        times.seconds[method][r] = total
        for part, seconds in zip(parts.values(), (measured, inverted, sampling), strict=True):
            part.append(seconds / total)
    return {name: statistics.median(values) for name, values in parts.items()}
