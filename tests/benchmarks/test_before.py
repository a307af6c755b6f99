import math
import runpy
import sys

import pytest
import torch

from benchmarks.before import speed, trajectories
from benchmarks.before.trajectory_probe import BASES, OPTIMIZERS, attempt, cases, steps_of
from benchmarks.house.trees import ROOT


def test_every_optimizer_of_the_documentation_has_trajectories():
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    family = page[page.index("| callback | optimizer |") :].partition("\n\n")[0].splitlines()[2:]
    named = {name for row in family for name in row.split("|")[2].replace("`", "").replace(",", " ").split()}
    assert named >= {"VOGN", "BlockTridiagonalKFAC"}
    assert named == set(OPTIMIZERS)


def test_every_optimizer_and_callback_is_a_case():
    names = cases()
    assert all(f"{name}, MLP" in names for name in OPTIMIZERS)
    assert all(f"VOGNCallback(), {base}" in names for base in ("adam", "sgd"))
    assert set(BASES) == {"adam", "sgd", "adamw"}


def test_a_trajectory_repeats_bit_for_bit_and_notices_another_learning_rate():
    first, again, other = (steps_of("VOGN", "mlp", lr=lr) for lr in (0.01, 0.01, 0.01 + 1e-5))
    compared = trajectories.compare({"same": first, "other": first}, {"same": again, "other": other})
    assert [each.difference == 0.0 for each in compared] == [True, False]
    assert [each.is_equal for each in compared] == [True, False]


def test_errors_are_compared_by_their_type():
    def refuse():
        raise ValueError("first line\nsecond line")

    assert attempt(refuse) == "ValueError: first line second line"
    before = {"same": "ValueError: a", "kind": "ValueError: a", "gone": torch.zeros(1), "shape": torch.zeros(1)}
    after = {"same": "ValueError: b", "kind": "TypeError: a", "shape": torch.zeros(2)}
    assert [each.is_equal for each in trajectories.compare(before, after)] == [True, False, False, False]


def test_numbers_that_are_not_finite_agree_only_with_themselves():
    nan, one = torch.tensor([math.nan]), torch.tensor([1.0])
    assert trajectories.compare({"a": nan}, {"a": nan})[0].is_equal
    assert not trajectories.compare({"a": nan}, {"a": one})[0].is_equal


def test_ratios_are_taken_within_a_round():
    before = [1.0, 10.0, 1.0, 10.0]  # a machine that is busy every second round
    compared = speed.summarise("VOGN", "lenet5", before, [1.02 * seconds for seconds in before])
    assert compared.ratio == pytest.approx(1.02)
    assert compared.quartiles == pytest.approx((1.02, 1.02))


def test_a_worker_times_blocks_of_its_own_tree():
    with speed.worker(ROOT, "cpu", 1) as worker:
        assert 0 < worker.time("VOGN", "lenet5", 1) < 60


def test_a_worker_that_fails_is_named(capfd):
    with pytest.raises(SystemExit, match="VOGN on nothing"), speed.worker(ROOT, "cpu", 1) as worker:
        worker.time("VOGN", "nothing", 1)


def test_the_command_line_lists_its_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["before", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("benchmarks.before", run_name="__main__")
    assert "--speed" in capsys.readouterr().out
