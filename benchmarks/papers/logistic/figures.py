"""Figures of the logistic regressions, after those of the papers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lightning_bayes.metrics.figure_style import BLUE, DPI, GREY, ORANGE, PANEL_WIDTH, SERIES, quiet_frame

Gaussian = tuple[Tensor, Tensor]  # mean and precision, [D]
Curves = Mapping[str, Mapping[int, Sequence[float]]]  # title → update → one value per run


def batches(values: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Fig. 2(c): symmetric KL over the minibatch size, by method; the first method is the baseline."""
    figure = Figure(figsize=(2 * PANEL_WIDTH, PANEL_WIDTH), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    _boxes(axes, values, dict.fromkeys(values, ORANGE) | {next(iter(values)): BLUE})
    axes.set(yscale="log", ylabel="symmetric KL to MF-exact, nats", title=title)
    return figure


def _colours(panels: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Assign each method the same colour in all panels."""
    return dict(zip(dict.fromkeys(method for panel in panels for method in panel), SERIES, strict=False))


def _boxes(axes: Axes, values: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> None:
    drawn = axes.boxplot(list(values.values()), widths=0.5, patch_artist=True, medianprops={"color": GREY})
    for box, method in zip(drawn["boxes"], values, strict=True):
        box.set(facecolor=colours[method], alpha=0.5)
    axes.set_xticks(range(1, len(values) + 1), list(values), rotation=20)
    quiet_frame(axes)


def curves(panels: Mapping[str, tuple[Curves, Curves]], exact: Mapping[str, tuple[float, float]], title: str) -> Figure:
    """Figs. 2-3 of the Vprop paper: negative ELBO and test log-loss over passes, one column per data set."""
    figure = Figure(figsize=(1.5 * PANEL_WIDTH * len(panels), 2 * PANEL_WIDTH), dpi=DPI, layout="constrained")
    grid = figure.subplots(2, len(panels), squeeze=False)
    colours = _colours(loss for _, loss in panels.values())  # every method has a log-loss
    labels = ("negative ELBO per example, nats", "test log-loss, bits")
    for column, (name, metrics) in enumerate(panels.items()):
        for row, (label, method_curves) in enumerate(zip(labels, metrics, strict=True)):
            axes = grid[row][column]
            _lines(axes, method_curves, colours)
            if name in exact:
                axes.axhline(exact[name][row], color=GREY, linestyle="--", label="VI exact")
            axes.set(title=name, xlabel="updates on all data", ylabel=label, xscale="log")
    grid[1][0].legend(frameon=False)  # this row has all methods: those without a posterior have no ELBO
    figure.suptitle(title)
    return figure


def _lines(axes: Axes, method_curves: Curves, colours: Mapping[str, str]) -> None:
    for title, points in method_curves.items():
        middle = [float(np.median(values)) for values in points.values()]
        axes.plot(list(points), middle, color=colours[title], label=title)
        low, high = (np.quantile(list(points.values()), q, axis=1) for q in (0.25, 0.75))
        axes.fill_between(list(points), low, high, color=colours[title], alpha=0.15, linewidth=0)
    if method_curves:  # diverging curves leave the panel
        finite = [
            v for points in method_curves.values() for values in points.values() for v in values if np.isfinite(v)
        ]
        axes.set_ylim(0.98 * min(finite), 1.05 * float(np.quantile(finite, 0.85)))
    quiet_frame(axes)
