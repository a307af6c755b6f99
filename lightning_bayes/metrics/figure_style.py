"""Colours and panels that the figures of this room share.

The figures are `matplotlib.figure.Figure` objects made without pyplot: no window, no global state, safe in a training
process. Save one with ``figure.savefig(path)`` or hand it to a logger.
"""

from __future__ import annotations

from collections.abc import Sized

from matplotlib.axes import Axes

from lightning_bayes.errors import ShapeError

# Okabe & Ito's palette, which people with any of the common colour deficiencies can tell apart.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
GREY = "#595959"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION)

PANEL_WIDTH = 3.6  # inches; legible with matplotlib's 10 point default
DPI = 150


def check_not_empty(panels: Sized, needed: str) -> None:
    """Refuse to draw a figure without panels.

    Args:
        panels: What would be drawn.
        needed: What one entry has to be, in words.

    Raises:
        ShapeError: If there is nothing to draw.
    """
    if len(panels) == 0:
        raise ShapeError(f"Nothing to draw: give at least one {needed}.")


def quiet_frame(axes: Axes) -> None:
    """Take the upper and right line of the frame away, and put a faint horizontal grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
