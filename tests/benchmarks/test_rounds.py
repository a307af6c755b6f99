from __future__ import annotations

import time

import pytest

from benchmarks.speed.rounds import Times, interleave, stopwatch, takes_part, words


class ScriptedClock:
    """Says for each visit of a step what the script says, and keeps the order of the visits."""

    def __init__(self, script):
        self.script = {name: iter(seconds) for name, seconds in script.items()}
        self.visits = []

    def __call__(self, step):
        name = step()
        self.visits.append(name)
        return next(self.script[name])


def run(script, rounds):
    clock = ScriptedClock(script)
    times = interleave({name: lambda name=name: name for name in script}, rounds, "adam", clock)
    return times, clock.visits


def test_the_ratio_is_the_median_of_the_ratios_within_a_round():
    times, _ = run({"adam": [9, 9, 1, 4, 4], "other": [9, 9, 2, 2, 12]}, rounds=3)
    assert times.median_ratio("other", "adam") == 2  # of 2, 0.5, 3; the ratio of the medians is 0.5
    assert times.median_seconds("other") == 2
    assert times.median_ratio("adam", "adam") == 1


def test_quartiles_are_those_of_the_ratios_within_a_round():
    times, _ = run({"adam": [9, 9, 1, 2, 1, 2, 1], "other": [9, 9, 1, 4, 3, 8, 5]}, rounds=5)
    assert times.ratio_quartiles("other", "adam") == [2, 4]  # of 1, 2, 3, 4, 5
    assert Times({"other": {0: 1.0}}).ratio_quartiles("other", "adam") is None


def test_warm_up_steps_are_not_counted():
    times, visits = run({"adam": [100, 100, 1, 1], "other": [100, 100, 3, 3]}, rounds=2)
    assert len(visits) == 8
    assert times.seconds == {"adam": {0: 1, 1: 1}, "other": {0: 3, 1: 3}}


def test_every_round_visits_every_method_and_starts_with_another():
    _, visits = run({name: [1] * 5 for name in ("adam", "b", "c")}, rounds=3)
    assert visits[6:] == ["adam", "b", "c", "b", "c", "adam", "c", "adam", "b"]


def test_a_slow_method_takes_part_in_a_quarter_of_the_rounds():
    times, visits = run({"adam": [1] * 22, "slow": [5] * 6}, rounds=20)
    assert visits[:4] == ["adam", "adam", "slow", "adam"]  # and has one step of warm-up, as it takes seconds
    assert len(times.seconds["adam"]) == 20
    assert list(times.seconds["slow"]) == [0, 4, 8, 12, 16]
    assert times.median_ratio("slow", "adam") == 5


def test_a_first_step_that_loads_libraries_does_not_make_a_method_slow():
    times, _ = run({"adam": [0.1] * 10, "other": [0.9] + [0.2] * 9}, rounds=8)
    assert len(times.seconds["other"]) == 8


@pytest.mark.parametrize(("rounds", "share"), [(1, 1), (2, 2), (4, 3), (15, 3), (40, 10)])
def test_slow_methods_take_part_in_at_least_three_rounds_of_those_there_are(rounds, share):
    assert sum(takes_part(r, rounds, slow=True) for r in range(rounds)) == share
    assert all(takes_part(r, rounds, slow=False) for r in range(rounds))


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_method_that_raises_is_reported_and_the_others_go_on(fails_at):
    visits = iter(range(100))

    def broken():
        if next(visits) == fails_at:
            raise ValueError("no such layer")

    steps = {"broken": broken, "adam": lambda: None}
    times = interleave(steps, 5, "adam", stopwatch())
    assert times.failures == {"broken": "ValueError: no such layer"}
    assert list(times.seconds) == ["adam"]
    assert len(times.seconds["adam"]) == 5
    assert list(steps) == ["adam"]


def test_without_a_baseline_there_is_no_ratio():
    assert Times({"other": {0: 1.0}}).median_ratio("other", "adam") is None


def test_an_error_is_one_line_of_bounded_length():
    assert words(KeyError("a\n  b")) == r"KeyError: 'a\n b'"
    assert words(RuntimeError("two\nlines")) == "RuntimeError: two lines"
    long = words(RuntimeError("word " * 1000))
    assert long.endswith("word …")
    assert len(long) <= 202


def test_the_stopwatch_waits_for_the_device_before_and_after(monkeypatch):
    order = []
    timed = stopwatch(lambda: order.append("wait"))
    assert timed(lambda: order.append("step")) >= 0
    assert order == ["wait", "step", "wait"]


def test_processor_time_leaves_out_waiting():
    assert stopwatch(clock="cpu")(lambda: time.sleep(0.05)) < 0.04
    assert stopwatch()(lambda: time.sleep(0.05)) >= 0.05
