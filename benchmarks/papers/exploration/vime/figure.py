"""Cumulative successes over iterations: one line per seed, and the median."""

from __future__ import annotations

import statistics
from itertools import accumulate
from pathlib import Path

from benchmarks.line_figure import line_figure
from benchmarks.papers.exploration.vime.report import TITLES, Row
from lightning_bayes.metrics.figure_style import BLUE, GREY, ORANGE


def draw(rows: list[Row], path: Path) -> None:
    """Draw the results and save the figure; the suffix of `path` selects the format."""
    with line_figure(path, (5.5, 3.6), fontsize=8) as axes:
        for method, colour in zip(TITLES, (GREY, ORANGE, BLUE), strict=True):
            curves = [list(accumulate(row["successes"])) for row in rows if row["method"] == method]
            for curve in curves:
                axes.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.3, linewidth=0.8)
            if curves:
                medians = [statistics.median(values) for values in zip(*curves, strict=False)]
                axes.plot(range(1, len(medians) + 1), medians, color=colour, label=f"{TITLES[method]}, median")
        axes.set(xlabel="iterations of 5000 time steps", ylabel="successes so far")
