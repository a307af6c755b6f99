"""Histograms of the scores that tell inputs out of distribution: which score keeps which set apart?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, check_not_empty, checked_values, draw_histograms
from lightning_bayes.metrics.ood import ood_auroc

TAIL = 0.005  # fraction of the values beyond either end of the axis; a single outlier would squeeze all others

COLUMNS = 3


def score_histograms(
    scores: Mapping[str, Mapping[str, Tensor]], title: str = "Scores for inputs out of distribution", bins: int = 40
) -> Figure:
    """Draw one panel per score, three in a row, each with its own axis, with one histogram per set of inputs.

    Each histogram is the fraction of its own set. The first set is in-distribution; the legend gives the AUROC at which
    the score tells each other set from it. The half percent of values at either end counts in the end bins.

    Args:
        scores: For each score and each set of inputs the values, ``[inputs]``; higher means more OOD.
        title: Title of the figure.
        bins: Number of bins.

    Returns:
        A figure with one axes per score.

    Raises:
        HyperparameterError: If there is no bin.

    Example:
        >>> figure = score_histograms({"entropy": {"test": torch.tensor([0.0, 0.1]), "photos": torch.tensor([2.1])}})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['test', 'photos, AUROC 100.0 %']
    """
    check_not_empty(scores, "score with its {set of inputs: values}")
    if bins < 1:
        raise HyperparameterError(f"A histogram needs at least one bin, got bins={bins}.")
    columns, rows = min(COLUMNS, len(scores)), -(-len(scores) // COLUMNS)
    figure = Figure(figsize=(PANEL_WIDTH * columns + 0.4, 3.3 * rows + 0.3), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    for position, (score, sets) in enumerate(scores.items()):
        axes = figure.add_subplot(rows, columns, position + 1)
        check_not_empty(sets, f"set of inputs for {score}")
        values = {name: checked_values(each, "Scores", f"{score}, {name}") for name, each in sets.items()}
        draw_histograms(axes, _labelled(values), _edges(torch.cat(list(values.values())), bins))
        axes.legend(frameon=False, fontsize=8, loc="upper right")
        axes.set(title=score.replace("_", " "), xlabel="Score (higher means more OOD)")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))  # labels such as -0.998 need room
        if position % columns == 0:
            axes.set_ylabel("Share of the set [%]")
    return figure


def _labelled(sets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    (name, inside), *others = sets.items()
    labelled = {name: inside}
    for other, values in others:
        is_ood = torch.arange(len(inside) + len(values)) >= len(inside)
        auroc = ood_auroc(torch.cat([inside, values]), is_ood)
        labelled[f"{other}, AUROC {100 * auroc:.1f} %"] = values
    return labelled


def _edges(values: Tensor, bins: int) -> Tensor:
    ordered = values.sort().values
    low, high = ordered[int(TAIL * len(ordered))].item(), ordered[-1 - int(TAIL * len(ordered))].item()
    if low == high:
        low, high = low - 0.5, high + 0.5
    return torch.linspace(low, high, bins + 1, dtype=torch.float64)
