"""The report's page: one self-contained HTML document without scripts, from ``page.html``, and the figures drawn for it."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from lightning_bayes.metrics import by_severity, shift_curves
from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, line_style, quiet_frame
from lightning_bayes.report.runs import Run, joined, named
from lightning_bayes.report.summary import shared_settings, summary, verdict
from lightning_bayes.report.tables import config_differences, metric_tables

_TITLES = {"ood_scores": "OOD scores", "risk_coverage": "Risk and coverage"}  # other titles come from the file name
_FIRST = ("reliability", "risk_coverage")  # figures at the top of the page

CURVES = {  # metric → title of its training curve
    "train/loss": "Training loss",
    "val/cls/NLL": "Validation NLL [nats]",
    "val/cls/Acc": "Validation accuracy",
    "val/cal/ECE": "Validation ECE",
    "val/reg/RMSE": "Validation RMSE",
    "val/reg/NLL": "Validation NLL per point [nats]",
}


class StoredFigure(NamedTuple):
    """A figure that one or more runs have saved."""

    name: str  # file name without the extension
    title: str
    images: dict[str, str]  # names of the runs with this image → PNG in base64


def render(runs: Sequence[Run], path: Path) -> str:
    """The HTML document that compares at least one run; links to configs below the folder of `path` are relative."""
    runs = named(joined(runs))
    drawn = {"Training": training_curves(runs), "Shift": shift_comparison(runs)}
    return _template_environment().get_template("page.html").render(
        runs=runs,
        data=list(dict.fromkeys(str(run.config["data.class_path"]) for run in runs if "data.class_path" in run.config)),
        summary=summary(runs, path),
        verdict=list(verdict(runs)),
        shared=shared_settings(runs),
        tables=metric_tables(runs),
        drawn={title: _base64(_png(figure)) for title, figure in drawn.items() if figure is not None},
        stored=_stored_figures(runs),
        differences=config_differences(runs),
    )  # fmt: skip


def _template_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["shown_width"] = _shown_width
    return environment


def _shown_width(png: str) -> int:
    """The width at which the text of a figure has the size of the page's."""
    # Bytes 16 to 19 of a PNG are its width in pixels, and matplotlib's text has ten points.
    return round(int.from_bytes(base64.b64decode(png[:32])[16:20], "big") * 100 / DPI)


def _stored_figures(runs: Sequence[Run]) -> list[StoredFigure]:
    names = sorted({name for run in runs for name in run.figures}, key=lambda name: (name not in _FIRST, name))
    return [
        StoredFigure(name, _TITLES.get(name, name.replace("_", " ").capitalize()), _images(name, runs))
        for name in names
    ]


def _images(name: str, runs: Sequence[Run]) -> dict[str, str]:
    """Each image of a figure once, under the names of all runs that saved it."""
    owners: dict[str, list[str]] = {}
    for run in runs:
        if name in run.figures:
            owners.setdefault(_base64(run.figures[name].read_bytes()), []).append(run.name)
    return {", ".join(names): png for png, names in owners.items()}


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _base64(png: bytes) -> str:
    return base64.b64encode(png).decode("ascii")


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
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(PANEL_WIDTH * columns, 6.0) + 0.4, 3.0 * rows + 0.6), dpi=DPI, layout="constrained")
    names = list(dict.fromkeys(name for curves in panels.values() for name, _ in curves))
    lines: dict[str, Line2D] = {}
    for position, (key, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, position)
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
