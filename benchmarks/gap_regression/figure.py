"""The bands of all methods on the same data, one panel each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.gap_regression.data import GAP, NOISE_STD, Band, Points, curve, grid
from lightning_bayes.metrics.figure_style import BLUE, DPI, GREY, VERMILLION, quiet_frame

LIMITS = (-3.2, 3.2)


def draw(bands: Mapping[str, Band], points: Points, path: Path) -> None:
    """Draw the bands by title with the training data, and save the figure; the suffix of `path` selects the format."""
    columns = 2
    rows = -(-len(bands) // columns)
    figure = Figure(figsize=(4.6 * columns, 2.9 * rows), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (title, band) in zip(panels.flat, bands.items(), strict=False):
        _panel(axes, title, band, points)
    for axes in panels.flat[len(bands) :]:
        axes.set_axis_off()
    for axes in panels[-1]:
        axes.set_xlabel("x")
    for axes in panels[:, 0]:
        axes.set_ylabel("y")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path)


def _panel(axes: Axes, title: str, band: Band, points: Points) -> None:
    x = grid().flatten().numpy()
    mean, std = np.array(band.mean), np.array(band.std)
    total = np.sqrt(std**2 + NOISE_STD**2)
    axes.axvspan(*GAP, color="0.95", linewidth=0)
    axes.fill_between(x, mean - 2 * total, mean + 2 * total, color=BLUE, alpha=0.15, linewidth=0, label="± 2 std of y")
    axes.fill_between(x, mean - 2 * std, mean + 2 * std, color=BLUE, alpha=0.35, linewidth=0, label="± 2 std of f")
    axes.plot(x, curve(grid()).flatten().numpy(), color=GREY, linestyle="--", linewidth=1, label="truth")
    axes.plot(x, mean, color=BLUE, linewidth=1.5, label="mean")
    axes.plot(*(part.flatten().numpy() for part in points), ".", color=VERMILLION, markersize=4, label="data")
    axes.set(ylim=LIMITS, xlim=(x[0], x[-1]))
    axes.set_title(title, fontsize=10)
    quiet_frame(axes)
