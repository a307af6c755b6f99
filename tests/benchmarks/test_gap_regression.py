"""The regression with a gap: the data, the methods in a short run, and the table of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gap_regression.__main__ import main, table
from benchmarks.gap_regression.data import EDGE, GAP, NOISE_STD, Band, curve, draw_points, grid, in_gap, on_data

ROOT = Path(__file__).parents[2]


def test_the_data_leave_the_gap_empty_and_have_the_stated_noise():
    inputs, targets = draw_points(2000, seed=0)
    assert ((inputs.abs() >= GAP[1]) & (inputs.abs() <= EDGE)).all()
    assert abs((targets - curve(inputs)).std() / NOISE_STD - 1) < 4 / (2 * 2000) ** 0.5
    assert not (on_data(grid()) & in_gap(grid())).any()


def test_spreads_are_averages_over_places():
    std = torch.where(in_gap(grid()), 0.4, 0.1).flatten().tolist()
    assert table({"q": Band([0.0] * len(std), std)}).endswith("| q | 0.100 | 0.400 | 4.0 |")


@pytest.mark.filterwarnings("ignore:The width 64 is the end of the search range")  # after one epoch
def test_a_short_run_prints_every_method_and_keeps_what_it_draws(tmp_path, capsys):
    torch_threads = torch.get_num_threads()
    files = ["--json", str(tmp_path / "kept.json"), "--plot", str(tmp_path / "gap.png")]
    main(["--epochs", "1", "--chains", "0", *files])
    printed = capsys.readouterr().out
    assert "PosteriorScale(linearized=True)" in printed
    assert printed.count("\n| ") == 6
    main(["--from", str(tmp_path / "kept.json")])
    assert capsys.readouterr().out.splitlines()[0] in printed
    assert (tmp_path / "gap.png").stat().st_size > 10_000
    torch.set_num_threads(torch_threads)


def test_the_page_shows_the_kept_results():
    kept = json.loads((ROOT / "benchmarks/results/gap_regression.json").read_text("utf-8"))
    bands = {title: Band(**band) for title, band in kept["bands"].items()}
    text = (ROOT / "docs/regression.md").read_text("utf-8")
    assert table(bands) in text, "insert what python -m benchmarks.gap_regression prints"
    for band in bands.values():
        assert band.scale is None or f"c = {band.scale:.3g}" in text
