"""Figures that the report draws from the logged values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lightning_bayes.metrics import by_severity, shift_curves
from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, SERIES, quiet_frame
from lightning_bayes.report.runs import Run

CURVES = {
    "train/loss": "Training loss",
    "val/cls/NLL": "Validation NLL [nats]",
    "val/cls/Acc": "Validation accuracy",
    "val/cal/ECE": "Validation ECE",
    "val/reg/RMSE": "Validation RMSE",
    "val/reg/NLL": "Validation NLL per point [nats]",
}


def training_curves(runs: Sequence[Run]) -> Figure | None:
    """Draw the training loss and the validation metrics against the epoch, one line per run.

    Args:
        runs: The runs.

    Returns:
        A figure with one panel per metric; None if no run has logged a metric twice.
    """
    shown = {
        key: [(run.name, _means(run.series[key])) for run in runs if len(_means(run.series.get(key, []))) > 1]
        for key in CURVES
    }
    shown = {key: lines for key, lines in shown.items() if lines}
    if not shown:
        return None
    figure = Figure(figsize=(max(PANEL_WIDTH * len(shown), 6.0) + 0.4, 4.0), dpi=DPI, layout="constrained")
    names = list(dict.fromkeys(name for lines in shown.values() for name, _ in lines))
    drawn: dict[str, Line2D] = {}
    for axes, (key, lines) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True):
        for name, points in lines:
            index = names.index(name)
            style = ("-", "--")[index // len(SERIES) % 2]
            (drawn[name],) = axes.plot(*zip(*points, strict=True), color=SERIES[index % len(SERIES)], linestyle=style)
        axes.set(title=CURVES[key], xlabel="Epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        quiet_frame(axes)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average the values of each epoch; metrics that are logged by step have many."""
    by_epoch: dict[float, list[float]] = {}
    for epoch, value in points:
        if math.isfinite(epoch) and math.isfinite(value):
            by_epoch.setdefault(epoch, []).append(value)
    return [(epoch, sum(values) / len(values)) for epoch, values in sorted(by_epoch.items())]


def shift_comparison(runs: Sequence[Run]) -> Figure | None:
    """Draw the shift curves of all runs.

    Args:
        runs: The runs.

    Returns:
        The figure; None if no run has logged shifts.
    """
    curves = {run.name: by_severity(run.last) for run in runs}
    curves = {name: each for name, each in curves.items() if each}
    return shift_curves(curves) if curves else None
