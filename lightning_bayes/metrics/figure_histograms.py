"""Histograms of the predictive entropy and of OOD scores: which sets of inputs do they separate?"""

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


def entropy_histogram(entropies: Panels, title: str = "Predictive entropy", bins: int = 25) -> Figure:
    """Draw one panel per model, side by side with shared axes, with one histogram per set of inputs.

    Histograms show fractions of their set, so sets of different sizes are comparable. All panels have the same bins, from 0
    to the largest entropy of any model.

    Args:
        entropies: For each model and each set of inputs, such as ``"in-distribution"`` and ``"OOD"``, the entropies of the
            predictions in nats, ``[inputs]``.
        title: Title of the figure.
        bins: Number of bins. Raises `HyperparameterError` if there is none.

    Returns:
        A figure with one axes per model and one filled outline per set.

    Example:
        >>> figure = entropy_histogram({"VOGN": {"digits": torch.tensor([0.0, 0.1]), "photos": torch.tensor([2.1])}})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['digits', 'photos']
    """
    checked = _checked_panels(entropies, "model with its {set of inputs: entropies}", "Entropies", bins)
    largest = max(float(values.max()) for sets in checked.values() for values in sets.values())
    # The entropy of a certain prediction can be -1e-8.
    edges = torch.linspace(0, largest if largest > 0 else 1.0, bins + 1, dtype=torch.float64)
    figure = Figure(figsize=(PANEL_WIDTH * len(entropies) + 0.4, 3.6), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(entropies), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (name, sets) in zip(panels, checked.items(), strict=True):
        _draw_histograms(axes, sets, edges)
        axes.legend(frameon=False, loc="upper right")
        axes.set(title=name, xlabel="Entropy [nats]", xlim=(0, 1.03 * edges[-1].item()))
    panels[0].set_ylabel("Fraction of the set [%]")
    return figure


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
    checked = _checked_panels(scores, "score with its {set of inputs: values}", "Scores", bins)
    columns, rows = min(COLUMNS, len(scores)), math.ceil(len(scores) / COLUMNS)
    figure = Figure(figsize=(PANEL_WIDTH * columns + 0.4, 3.3 * rows + 0.3), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    for position, (score, sets) in enumerate(checked.items()):
        axes = figure.add_subplot(rows, columns, position + 1)
        _draw_histograms(axes, _with_auroc(sets), _edges(torch.cat(list(sets.values())), bins))
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


def _checked_panels(panels: Panels, panel: str, what: str, bins: int) -> dict[str, dict[str, Tensor]]:
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


def _draw_histograms(axes: Axes, sets: Mapping[str, Tensor], edges: Tensor) -> None:
    """Draw one filled outline per set: the fraction of the set in each bin, so sets of different sizes are comparable."""
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
