"""One panel of lines with a legend, saved to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_bayes.metrics.figure_style import DPI


@contextmanager
def line_figure(path: Path, size: tuple[float, float], **legend: Any) -> Iterator[Axes]:
    """Draw inside the context; its end writes the file."""
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, **legend)
    figure.savefig(path)
