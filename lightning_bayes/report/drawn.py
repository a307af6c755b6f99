"""Figures of logged values: training curves, and metrics under distribution shift."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lightning_bayes.metrics import by_severity, shift_curves
from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, line_style, quiet_frame
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
    """Draw the training loss and the validation metrics by epoch, one line per run; None if no run has two epochs."""
    panels: dict[str, list[tuple[str, list[tuple[float, float]]]]] = {}  # metric → (run's name, points)
    for key in CURVES:
        curves = [(run.name, _epoch_means(run.series.get(key, []))) for run in runs]
        curves = [(name, points) for name, points in curves if len(points) > 1]
        if curves:
            panels[key] = curves
    if not panels:
        return None
    figure = Figure(figsize=(max(PANEL_WIDTH * len(panels), 6.0) + 0.4, 4.0), dpi=DPI, layout="constrained")
    names = list(dict.fromkeys(name for curves in panels.values() for name, _ in curves))
    lines: dict[str, Line2D] = {}
    for axes, (key, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, points in curves:
            (lines[name],) = axes.plot(*zip(*points, strict=True), **line_style(names.index(name)))
        axes.set(title=CURVES[key], xlabel="Epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        quiet_frame(axes)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _epoch_means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average the values of each epoch: a metric that is logged every few steps has several."""
    by_epoch: dict[float, list[float]] = {}
    for epoch, value in points:
        if math.isfinite(epoch) and math.isfinite(value):
            by_epoch.setdefault(epoch, []).append(value)
    return [(epoch, sum(values) / len(values)) for epoch, values in sorted(by_epoch.items())]


def shift_comparison(runs: Sequence[Run]) -> Figure | None:
    """Draw the metrics under distribution shift by severity; None if no run has logged them."""
    curves = {run.name: by_severity(run.last) for run in runs}
    curves = {name: by_level for name, by_level in curves.items() if by_level}
    return shift_curves(curves) if curves else None
