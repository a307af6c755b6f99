"""Histograms of OOD scores: which sets of inputs do they separate?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lightning_bayes.errors import HyperparameterError, NonFiniteError, ShapeError
from lightning_bayes.metrics.detection import ood_auroc
from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, SERIES, check_not_empty, quiet_frame

Panels: TypeAlias = Mapping[str, Mapping[str, Tensor]]  # for each panel and each set of inputs, the values [inputs]

TAIL = 0.005  # fraction of scores beyond either end of the axis, because one outlier would compress the others
COLUMNS = 3


def score_histograms(scores: Panels, title: str = "Scores for inputs out of distribution", bins: int = 40) -> Figure:
    """Draw one panel per score, three in a row, with one histogram per set of inputs.

    Histograms show fractions of their set. The first set is in-distribution, and the legend gives the AUROC of every other
    set against it. The lowest and highest half percent of values count in the first and last bin.

    Args:
        scores: For each score and each set of inputs, the values, ``[inputs]``; higher means more OOD. Panels may also be
            models, each with the same score.
        title: Title of the figure.
        bins: Number of bins. Raises `HyperparameterError` if there is none.

    Returns:
        A figure with one axes per score.
    """
    checked = _checked_panels(scores, bins)
    columns, rows = min(COLUMNS, len(scores)), math.ceil(len(scores) / COLUMNS)
    figure = Figure(figsize=(PANEL_WIDTH * columns + 0.4, 4.0 * rows + 0.3), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    for position, (score, sets) in enumerate(checked.items()):
        axes = figure.add_subplot(rows, columns, position + 1)
        _draw_histograms(axes, _with_auroc(sets), _edges(torch.cat(list(sets.values())), bins))
        axes.legend(
            frameon=False, loc="lower left", bbox_to_anchor=(0, 1), title=score.replace("_", " ")
        )  # above the bars
        axes.set(xlabel="Score (higher means more OOD)")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))  # labels such as -0.998 need room
        if position % columns == 0:
            axes.set_ylabel("Fraction of the set")
    return figure


def _with_auroc(sets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the AUROC against the first set to the names of the other sets."""
    (first_name, in_distribution), *ood_sets = sets.items()
    labelled = {first_name: in_distribution}
    for name, values in ood_sets:
        is_ood = torch.arange(len(in_distribution) + len(values)) >= len(in_distribution)
        auroc = ood_auroc(torch.cat([in_distribution, values]), is_ood)
        labelled[f"{name}, AUROC {auroc:.3f}"] = values
    return labelled


def _edges(values: Tensor, bins: int) -> Tensor:
    ordered = values.sort().values
    tail = int(TAIL * len(ordered))
    low, high = ordered[tail].item(), ordered[-1 - tail].item()
    if low == high:
        low, high = low - 0.5, high + 0.5
    return torch.linspace(low, high, bins + 1, dtype=torch.float64)


def _checked_panels(panels: Panels, bins: int) -> dict[str, dict[str, Tensor]]:
    """The values of histograms on the CPU in float64, all finite."""
    check_not_empty(panels, "score with its {set of inputs: values}")
    if bins < 1:
        raise HyperparameterError(f"A histogram needs at least one bin, got bins={bins}.")
    for name, sets in panels.items():
        check_not_empty(sets, f"set of inputs for {name}")
    return {
        name: {key: _checked_values(values, f"{name}, {key}") for key, values in sets.items()}
        for name, sets in panels.items()
    }


def _checked_values(values: Tensor, where: str) -> Tensor:
    if values.ndim != 1 or len(values) == 0:
        raise ShapeError(f"Scores of {where} must be a non-empty vector [inputs], got {list(values.shape)}.")
    if not bool(values.isfinite().all()):
        bad = int((~values.isfinite()).sum())
        raise NonFiniteError(f"{bad} of {len(values)} scores of {where} are not finite; leave these inputs out.")
    return values.detach().cpu().double()


def _draw_histograms(axes: Axes, sets: Mapping[str, Tensor], edges: Tensor) -> None:
    """Draw one filled outline per set: the fraction of the set in each bin, so sets of different sizes are comparable."""
    for index, (name, values) in enumerate(sets.items()):
        clamped = values.clamp(edges[0].item(), edges[-1].item())
        fractions = torch.histogram(clamped, edges).hist / len(clamped)
        colour = SERIES[index % len(SERIES)]
        axes.stairs(
            fractions.numpy(),
            edges.numpy(),
            fill=True,
            facecolor=to_rgba(colour, 0.35),
            edgecolor=colour,
            linewidth=1.5,
            label=name,
        )
    quiet_frame(axes)
