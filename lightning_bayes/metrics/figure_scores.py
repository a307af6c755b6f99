"""Histograms of OOD scores: which score separates which set of inputs?"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, Panels, checked_panels, draw_histograms
from lightning_bayes.metrics.ood import ood_auroc

TAIL = 0.005  # fraction of values beyond either end of the axis, because one outlier would compress the others
COLUMNS = 3


def score_histograms(scores: Panels, title: str = "Scores for inputs out of distribution", bins: int = 40) -> Figure:
    """Draw one panel per score, three in a row, with one histogram per set of inputs.

    Histograms show fractions of their set. The first set is in-distribution, and the legend gives the AUROC of every other
    set against it. The lowest and highest half percent of values count in the first and last bin.

    Args:
        scores: For each score and each set of inputs, the values, ``[inputs]``; higher means more OOD.
        title: Title of the figure.
        bins: Number of bins. Raises `HyperparameterError` if there is none.

    Returns:
        A figure with one axes per score.

    Example:
        >>> figure = score_histograms({"entropy": {"test": torch.tensor([0.0, 0.1]), "photos": torch.tensor([2.1])}})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['test', 'photos, AUROC 100.0 %']
    """
    checked = checked_panels(scores, "score with its {set of inputs: values}", "Scores", bins)
    columns, rows = min(COLUMNS, len(scores)), math.ceil(len(scores) / COLUMNS)
    figure = Figure(figsize=(PANEL_WIDTH * columns + 0.4, 3.3 * rows + 0.3), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    for position, (score, sets) in enumerate(checked.items()):
        axes = figure.add_subplot(rows, columns, position + 1)
        draw_histograms(axes, _with_auroc(sets), _edges(torch.cat(list(sets.values())), bins))
        axes.legend(frameon=False, fontsize=8, loc="upper right")
        axes.set(title=score.replace("_", " "), xlabel="Score (higher means more OOD)")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))  # labels such as -0.998 need room
        if position % columns == 0:
            axes.set_ylabel("Fraction of the set [%]")
    return figure


def _with_auroc(sets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the AUROC against the first set to the names of the other sets."""
    (first_name, in_distribution), *ood_sets = sets.items()
    labelled = {first_name: in_distribution}
    for name, values in ood_sets:
        is_ood = torch.arange(len(in_distribution) + len(values)) >= len(in_distribution)
        auroc = ood_auroc(torch.cat([in_distribution, values]), is_ood)
        labelled[f"{name}, AUROC {100 * auroc:.1f} %"] = values
    return labelled


def _edges(values: Tensor, bins: int) -> Tensor:
    ordered = values.sort().values
    tail = int(TAIL * len(ordered))
    low, high = ordered[tail].item(), ordered[-1 - tail].item()
    if low == high:
        low, high = low - 0.5, high + 0.5
    return torch.linspace(low, high, bins + 1, dtype=torch.float64)
