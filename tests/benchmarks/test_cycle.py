"""The mean step of K-FAC, put together from kinds of steps, against the steps that training takes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed import cycle
from benchmarks.speed.cycle import Cycle, Intervals, combine, expand
from benchmarks.speed.methods import METHODS
from benchmarks.speed.models import make_task
from benchmarks.speed.rounds import MeanOfUpdates, Times
from lightning_bayes.optim.kronecker.layer import KroneckerLayer


@pytest.fixture
def counted(monkeypatch):
    """How often factors are averaged in and inverted."""
    counts = {"average_factors": 0, "invert": 0}
    for name in counts:
        original = getattr(KroneckerLayer, name)

        def counting(*arguments, name=name, original=original):
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(KroneckerLayer, name, counting)
    return counts


@pytest.mark.parametrize("method", ["kfac", "noisy_kfac"])
def test_each_kind_of_step_measures_or_inverts_both_layers_or_does_neither(method, tiny, setting, counted):
    steps = METHODS[method].build(make_task(tiny, 4, setting))
    for first in (steps, steps.statistics, steps.inversion):
        counted.update(average_factors=0, invert=0)
        first()
        assert counted == {"average_factors": 2, "invert": 2}
    for kind, expected in [("plain", (0, 0)), ("statistics", (2, 0)), ("inversion", (0, 2)), ("sampling", (0, 0))] * 3:
        counted.update(average_factors=0, invert=0)
        getattr(steps, kind)()
        assert (counted["average_factors"], counted["invert"]) == expected, kind


def test_sampling_moves_no_parameter(tiny, setting):
    task = make_task(tiny, 4, setting)
    steps = METHODS["noisy_kfac"].build(task)
    steps()
    before = [param.detach().clone() for param in task.model.parameters()]
    steps.sampling()
    assert all(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))


def test_the_mean_step_is_that_of_a_hundred_steps():
    plain, statistics, inversion = 1.0, 3.0, 51.0
    names = [f"kfac{cycle.SEPARATOR}{kind}" for kind in Cycle._fields]
    times = Times(dict(zip(names, ({0: s, 1: s} for s in (plain, statistics, inversion, 0.13)), strict=True)))
    shares = combine(times, ["adam", "kfac"])
    assert Intervals.of("kfac") == Intervals.of("noisy_kfac-natural") == (10, 100)
    steps = [plain] * 100
    for number in range(0, 100, 10):
        steps[number] += statistics - plain
    steps[7] += inversion - plain
    mean = sum(steps) / 100
    assert times.seconds["kfac"] == pytest.approx({0: mean, 1: mean})
    assert shares["kfac"] == pytest.approx({"statistics": 0.2 / mean, "inversion": 0.5 / mean, "sampling": 0.13 / mean})


def test_only_cycles_are_expanded():
    def step():
        pass

    assert list(
        expand({"adam": step, "kfac": Cycle(MeanOfUpdates(step, 10), step, step, MeanOfUpdates(step, 10))})
    ) == [
        "adam",
        *(f"kfac: {kind}" for kind in Cycle._fields),
    ]


def test_a_kind_of_step_that_fails_is_the_methods_failure():
    times = Times({"kfac: plain": {0: 1.0}}, {"kfac: inversion": "RuntimeError: singular"})
    assert combine(times, ["kfac"]) == {}
    assert times.failures["kfac"] == "RuntimeError: singular"
