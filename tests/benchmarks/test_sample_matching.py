"""The benchmark of matched samples on one problem with few epochs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.defaults import sample_matching
from benchmarks.defaults.problems import PROBLEMS


def test_the_table_has_the_errors_of_both_kinds(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sample_matching.PROBLEMS, "digits-100-mlp", replace(PROBLEMS["digits-100-mlp"], epochs=3))
    monkeypatch.setattr(sample_matching, "REFERENCE", 50)
    arguments = ["--root", str(tmp_path), "--problems", "digits-100-mlp", "--seeds", "2", "--samples", "4"]
    sample_matching.main([*arguments, "--json", str(tmp_path / "result.json")])
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [10, 11]
    assert all(0 < row["matched error"] < 1 for row in rows)
    assert all(row["matched error"] != row["independent error"] for row in rows)
    line = capsys.readouterr().out.splitlines()[-1]
    mean = sum(row["matched error"] for row in rows) / 2
    assert line.startswith("| digits-100-mlp | 4 | ")
    assert float(line.split("|")[4]) == pytest.approx(mean, abs=1e-4)
