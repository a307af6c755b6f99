"""Test log-likelihoods of all methods and the published values, one panel per set."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.papers.uci.methods import METHODS
from benchmarks.papers.uci.published import KHAN, SETS, ZHANG
from benchmarks.papers.uci.report import Row, mean_and_error
from lightning_bayes.metrics.figure_style import BLUE, DPI, ORANGE, VERMILLION

COLUMNS = 4


def draw(rows: list[Row], path: Path) -> None:
    """Draw the results and save the figure; the suffix of `path` selects the format."""
    names = [name for name in SETS if any(row["set"] == name for row in rows)]
    lines = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(3.4 * COLUMNS, 2.9 * lines), dpi=DPI, layout="constrained")
    panels = figure.subplots(lines, COLUMNS, squeeze=False).flat
    for axes, name in zip(panels, names, strict=False):
        _panel(axes, name, [row for row in rows if row["set"] == name])
    for axes in list(figure.axes)[len(names) :]:
        axes.remove()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def _panel(axes: Axes, name: str, rows: list[Row]) -> None:
    for height, row in enumerate(rows):
        mean, error = mean_and_error(row["log_likelihood"])
        axes.errorbar(mean, height, xerr=2 * error, fmt="o", color=BLUE, label="here, ± 2 standard errors")
    for table, marker, colour, label, offset in (
        (ZHANG, "D", VERMILLION, "Zhang et al. 2018", 0.2),
        (KHAN, "s", ORANGE, "Khan et al. 2018", -0.2),
    ):
        published = [(height, table[row["method"]][name]) for height, row in enumerate(rows) if row["method"] in table]
        means, errors = [f.log_likelihood[0] for _, f in published], [2 * f.log_likelihood[1] for _, f in published]
        heights = [height + offset for height, _ in published]
        axes.errorbar(means, heights, xerr=errors, fmt=marker, mfc="none", color=colour, label=label, markersize=4)
    axes.set_yticks(range(len(rows)), [METHODS[row["method"]].title for row in rows])
    axes.set(title=name, xlabel="log-likelihood [nats/point]")
    axes.locator_params(axis="x", nbins=4)
    axes.spines[["top", "right"]].set_visible(False)
    _one_of_each_label(axes)


def _one_of_each_label(axes: Axes) -> None:
    seen: set[str] = set()
    for container in axes.containers:
        label = str(container.get_label())
        container.set_label("_nolegend_" if label in seen else label)
        seen.add(label)
