"""Colours and panels shared by all figures.

Figures are `matplotlib.figure.Figure` objects made without pyplot. They open no window and change no global state, so they
are safe in a training process. Save one with ``figure.savefig(path)`` or pass it to a logger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError

Panels: TypeAlias = Mapping[str, Mapping[str, Tensor]]  # for each panel and each set of inputs, the values [inputs]

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
    """Colour and line style of a series; lines are dashed once all colours are used."""
    return {"color": SERIES[index % len(SERIES)], "linestyle": ("-", "--")[index // len(SERIES) % 2]}


def quiet_frame(axes: Axes) -> None:
    """Remove the upper and right lines of the frame, and draw a faint horizontal grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def checked_panels(panels: Panels, panel: str, what: str, bins: int) -> dict[str, dict[str, Tensor]]:
    """Return the values of histograms on the CPU in float64, all finite; `panel` and `what` describe them in errors."""
    check_not_empty(panels, panel)
    if bins < 1:
        raise HyperparameterError(f"A histogram needs at least one bin, got bins={bins}.")
    for name, sets in panels.items():
        check_not_empty(sets, f"set of inputs for {name}")
    return {
        name: {key: _checked_values(values, what, f"{name}, {key}") for key, values in sets.items()}
        for name, sets in panels.items()
    }


def _checked_values(values: Tensor, what: str, where: str) -> Tensor:
    if values.ndim != 1 or len(values) == 0:
        raise ShapeError(f"{what} of {where} must be a non-empty vector [inputs], got {list(values.shape)}.")
    if not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).sum())
        raise NonFiniteError(
            f"{bad} of {len(values)} {what.lower()} of {where} are not finite; leave these inputs out."
        )
    return values.detach().cpu().double()


def draw_histograms(axes: Axes, sets: Mapping[str, Tensor], edges: Tensor) -> None:
    """Draw one filled outline per set: the fraction of the set in each bin, so sets of different sizes are comparable.

    Args:
        axes: Where to draw.
        sets: Values of `checked_panels` by name of the set. Values outside the edges count in the first or last bin.
        edges: Edges of the bins, increasing, float64.
    """
    for index, (name, values) in enumerate(sets.items()):
        clamped = values.clamp(edges[0].item(), edges[-1].item())
        percent = 100 * torch.histogram(clamped, edges).hist / len(clamped)
        colour = SERIES[index % len(SERIES)]
        axes.stairs(
            percent.numpy(),
            edges.numpy(),
            fill=True,
            facecolor=to_rgba(colour, 0.35),
            edgecolor=colour,
            linewidth=1.5,
            label=name,
        )
    quiet_frame(axes)
