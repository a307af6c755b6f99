"""The benchmark of bands in a gap on one short fit per callback."""

from __future__ import annotations

import json

import pytest

from benchmarks import gap_bands


def test_every_callback_is_measured_for_every_seed(tmp_path, capsys):
    gap_bands.main(["--seeds", "1", "--epochs", "30", "--json", str(tmp_path / "r.json")])
    runs = json.loads((tmp_path / "r.json").read_text("utf-8"))["runs"]
    assert [run["method"] for run in runs] == list(gap_bands.METHODS)
    table = capsys.readouterr().out.splitlines()
    assert [line[:32].strip() for line in table[1:]] == list(gap_bands.METHODS)


@pytest.mark.parametrize(("low", "high"), [(0.4, 1.0), (0.0, 0.4)])
def test_points_lie_on_both_sides(low, high):
    x, _ = gap_bands.Curve(0).draw(500, low, high).tensors
    assert low <= x.abs().min() < x.abs().max() <= high
    assert 0.4 < (x > 0).float().mean() < 0.6
