from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_bayes.report import Run
from lightning_bayes.report.page import shift_comparison, training_curves


def run(name, series, last=None):
    return Run(name, Path(name), last or {}, series, {}, "", {}, [])


def test_curves_are_means_over_the_steps_of_an_epoch():
    steps = [(0, 4.0), (0, 2.0), (1, 1.0), (1, float("nan")), (float("nan"), 7.0)]
    figure = training_curves([run("a", {"train/loss": steps})])
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0, 3], [1, 1]])


def test_the_legend_names_every_run_also_those_that_logged_no_loss():
    accuracy = [(0, 0.5), (1, 0.6)]
    runs = [
        run("a", {"train/loss": [(0, 2.0), (1, 1.0)], "val/cls/Acc": accuracy}),
        run("b", {"val/cls/Acc": accuracy}),
        run("tested", {"test/cls/Acc": [(1, 0.6)]}),
    ]
    figure = training_curves(runs)
    assert [axes.get_title() for axes in figure.axes] == ["Training loss", "Validation accuracy"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    first, second = figure.axes[1].lines
    assert first.get_color() == figure.axes[0].lines[0].get_color() != second.get_color()
    assert [line.get_linestyle() for line in (first, second)] == ["-", "--"]  # both are seen where they are equal


def test_a_single_point_is_no_curve():
    assert training_curves([run("a", {"val/cls/Acc": [(0, 0.5)]})]) is None


def test_runs_with_shifts_are_compared():
    keys = ("cls/Acc", "cls/NLL", "cal/ECE")
    logged = {f"{prefix}{key}": 0.5 for prefix in ("test/", "shift/fog/1/") for key in keys}
    figure = shift_comparison([run("a", {}, logged), run("b", {}, {"test/cls/Acc": 0.5})])
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a"]
    assert shift_comparison([run("b", {}, {"test/cls/Acc": 0.5})]) is None
