"""Colours and panels of all figures.

The figures are `matplotlib.figure.Figure` objects made without pyplot: no window, no global state, safe in a training
process. Save one with ``figure.savefig(path)`` or hand it to a logger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from torch import Tensor

from lightning_bayes.errors import NonFiniteError, ShapeError

# Okabe & Ito's palette, which people with any of the common colour deficiencies can tell apart.
BLUE, ORANGE, GREEN, VERMILLION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
GREY = "#595959"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION)

PANEL_WIDTH = 3.6  # inches; legible with matplotlib's 10 point default
DPI = 150


def check_not_empty(panels: Sized, needed: str) -> None:
    """Refuse to draw a figure without panels.

    Args:
        panels: The panels to draw.
        needed: The kind of one entry, in words.

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


def checked_values(values: Tensor, what: str, where: str) -> Tensor:
    """Require a vector of finite numbers.

    Args:
        values: The values to draw, ``[inputs]``.
        what: The name of the values, in words.
        where: Their owner, in words.

    Returns:
        The values on the CPU in float64.

    Raises:
        ShapeError: If it is not a vector, or is empty.
        NonFiniteError: If a value is not finite.
    """
    if values.ndim != 1 or len(values) == 0:
        raise ShapeError(f"{what} must be a non-empty vector [inputs]; those of {where} are {list(values.shape)}.")
    if not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).sum())
        raise NonFiniteError(
            f"{bad} of {len(values)} {what.lower()} of {where} are not finite; leave these inputs out."
        )
    return values.detach().cpu().double()


def draw_histograms(axes: Axes, sets: Mapping[str, Tensor], edges: Tensor) -> None:
    """Draw a filled outline per set: the fraction of its own inputs in each bin, so that sets of different sizes compare.

    Args:
        axes: Where to draw.
        sets: Values by the name of the set, ``[inputs]`` each; what lies outside of the edges counts in the end bins.
        edges: Edges of the bins, increasing, float64.
    """
    for index, (name, values) in enumerate(sets.items()):
        inside = values.detach().cpu().double().clamp(edges[0].item(), edges[-1].item())
        share = 100 * torch.histogram(inside, edges).hist / len(inside)
        colour = SERIES[index % len(SERIES)]
        axes.stairs(
            share.numpy(),
            edges.numpy(),
            fill=True,
            facecolor=to_rgba(colour, 0.35),
            edgecolor=colour,
            linewidth=1.5,
            label=name,
        )
    quiet_frame(axes)
