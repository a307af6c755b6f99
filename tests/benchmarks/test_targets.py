"""The table of targets: what a mean step is put together from, and what a second run measures again."""

from __future__ import annotations

import json

import pytest

from benchmarks.speed import evaluation, targets
from benchmarks.speed.rounds import Times
from benchmarks.speed.targets import Kinds, _row, amortised, main
from lightning_bayes import VOGN
from lightning_bayes.curvature.fused import FusedEngine
from lightning_bayes.optim import CounterNoise

pytestmark = pytest.mark.usefixtures("_tiny_models")


def test_one_of_ten_steps_measures_and_draws(setting, monkeypatch):
    kinds = amortised(VOGN, 10)("tiny", 4, setting)
    for step in kinds.steps.values():
        step()
    seen = []
    capture, draw_ = FusedEngine.capture, CounterNoise.draw_
    monkeypatch.setattr(FusedEngine, "capture", lambda self: (seen.append("measures"), capture(self))[1])
    monkeypatch.setattr(CounterNoise, "draw_", lambda self, tensors: (seen.append("draws"), draw_(self, tensors)))
    kinds.steps["plain"]()
    assert seen == []
    kinds.steps["tenth"]()
    assert sorted(seen) == ["draws", "measures"]
    assert kinds.weights == {"plain": 0.9, "tenth": 0.1}


def test_a_mean_step_is_taken_round_by_round():
    times = Times(
        {"adam: step": {0: 1.0, 1: 2.0, 2: 4.0}, "a: x": {0: 1.0, 1: 2.0, 2: 4.0}, "a: y": {0: 3.0, 1: 6.0, 2: 12.0}}
    )
    row = _row("tiny", 4, "a", Kinds({"x": lambda: None, "y": lambda: None}, {"x": 0.9, "y": 0.1}), times)
    assert row["ratio"] == pytest.approx(1.2)
    assert row["seconds"] == pytest.approx(2.4)


def test_a_second_run_measures_what_is_missing_and_no_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(targets, "provenance", lambda: {"commit": "a", "processor": "b"})
    path, measured, measure = tmp_path / "t.json", [], targets.measure
    monkeypatch.setattr(targets, "measure", lambda *a: (measured.append(a[0]), measure(*a))[1])
    common = ["--methods", "floor", "vadam", "--batch", "4", "--seconds", "0", "--json", str(path)]
    main(["--models", "tiny", *common])
    main(["--models", "tiny", "tiny-bn", *common])
    assert measured == ["tiny", "tiny-bn"]
    assert [row["method"] for row in json.loads(path.read_text("utf-8"))["results"]] == ["adam", "floor", "vadam"] * 2
    printed = capsys.readouterr().out
    assert "| Tiny-BN | 4 |" in printed
    assert "[1.15]" in printed


def test_evaluation_is_compared_with_forwards(capsys):
    evaluation.main(["--models", "tiny", "--batch", "4", "--samples", "3", "--rounds", "2"])
    assert "S = 3" in capsys.readouterr().out
