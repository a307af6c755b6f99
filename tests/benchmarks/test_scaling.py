from __future__ import annotations

import json

import pytest

from benchmarks.speed.scaling import draw, fits, main, straightness


def row(batch, method, seconds, added):
    return {"model": "lenet", "batch": batch, "method": method, "seconds": seconds, "added_mib": added}


ROWS = [
    *(row(b, "adam", 1 + 2 * b, 10 + b) for b in (8, 16, 32)),
    *(row(b, "vogn-fused", 2 + 3 * b, None) for b in (8, 16, 32)),
]


def test_a_line_is_found_exactly():
    assert straightness([1, 2, 4], [3, 5, 9]) == pytest.approx((1, 2, 1))


def test_what_is_no_line_is_said():
    assert straightness([1, 2, 3, 4], [1, -1, -1, 1])[2] == pytest.approx(0)


def test_fits_the_seconds_of_each_method():
    adam, vogn = fits(ROWS)
    assert (adam["method"], adam["seconds"], adam["seconds_per_example"]) == (
        "adam",
        pytest.approx(1),
        pytest.approx(2),
    )
    assert vogn["seconds_per_example"] == pytest.approx(3)


def test_the_plot_shows_every_row_with_a_figure():
    left, right = draw(ROWS).axes
    assert left.lines[0].get_xydata().tolist() == [[b, 1e3 * (1 + 2 * b)] for b in (8, 16, 32)]
    assert [len(line.get_xdata()) for line in right.lines] == [3, 0]  # no memory figures for VOGN


@pytest.mark.usefixtures("_tiny_models")
def test_writes_rows_lines_and_plot(tmp_path, capsys):
    result, plot = tmp_path / "r.json", tmp_path / "p.png"
    batches = ["--batch", "2", "4", "6"]
    main(["--models", "tiny", *batches, "--rounds", "2", "--no-memory", "--json", str(result), "--plot", str(plot)])
    found = json.loads(result.read_text("utf-8"))
    assert [r["batch"] for r in found["results"]] == [2, 2, 4, 4, 6, 6]
    assert [f["method"] for f in found["fits"]] == ["adam", "vogn-fused"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "R²" in capsys.readouterr().out
