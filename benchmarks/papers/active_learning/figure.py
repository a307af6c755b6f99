"""Test error over the number of labelled rows, one panel per set."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.active_learning.report import Row
from benchmarks.papers.active_learning.trials import NUM_TRAIN
from benchmarks.papers.uci.methods import METHODS
from lightning_bayes.metrics.figure_style import BLUE, DPI, GREY, ORANGE, VERMILLION

COLOURS = {"bbb": ORANGE, "noisy_adam_fisher": BLUE, "noisy_kfac": VERMILLION}


def draw(rows: list[Row], path: Path) -> None:
    """Draw the results and save the figure; the suffix of `path` selects the format."""
    names = list(dict.fromkeys(row["set"] for row in rows))
    figure = Figure(figsize=(max(5.2, 3.2 * len(names)), 3.6), dpi=DPI, layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        _panel(axes, name, [row for row in rows if row["set"] == name])
    figure.axes[0].set_ylabel("test RMSE")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path)


def _panel(axes: Axes, name: str, rows: list[Row]) -> None:
    for row in rows:
        active, random = torch.tensor(row["rmse"]).chunk(2, 1)
        labelled = range(NUM_TRAIN, NUM_TRAIN + len(active))
        colour, title = COLOURS.get(row["method"], GREY), METHODS[row["method"]].title
        axes.plot(labelled, active.mean(1), color=colour, label=f"{title}, active")
        axes.plot(labelled, random.mean(1), color=colour, linestyle=":", label=f"{title}, random")
        if row["method"] == "noisy_kfac":
            error = active.std(1) / active.shape[1] ** 0.5
            axes.fill_between(labelled, active.mean(1) - error, active.mean(1) + error, color=colour, alpha=0.15, lw=0)
    axes.set(title=name, xlabel="labelled rows")
    axes.spines[["top", "right"]].set_visible(False)
