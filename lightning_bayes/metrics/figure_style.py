"""Colours and panels shared by all figures.

Figures are `matplotlib.figure.Figure` objects made without pyplot. They open no window and change no global state, so they
are safe in a training process. Save one with ``figure.savefig(path)`` or pass it to a logger.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from matplotlib.axes import Axes

from lightning_bayes.errors import ShapeError

# Okabe & Ito's palette, which is readable with all common colour vision deficiencies.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
GREY = "#595959"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION)

PANEL_WIDTH = 3.6  # inches; legible with matplotlib's 10 point default
DPI = 150


def check_not_empty(panels: Sized, needed: str) -> None:
    """Raise a `ShapeError` if there are no panels to draw; `needed` describes one panel."""
    if len(panels) == 0:
        raise ShapeError(f"Nothing to draw: pass at least one {needed}.")


def line_style(index: int) -> dict[str, Any]:
    """Colour and line style of a series; every second line is dashed, so that two equal series are both seen."""
    return {"color": SERIES[index % len(SERIES)], "linestyle": ("-", "--")[index % 2]}


def quiet_frame(axes: Axes) -> None:
    """Remove the upper and right lines of the frame, and draw a faint horizontal grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
