"""Histograms of the predictive entropy: is the model more uncertain on unfamiliar inputs?"""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, Panels, checked_panels, draw_histograms


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
    checked = checked_panels(entropies, "model with its {set of inputs: entropies}", "Entropies", bins)
    largest = max(float(values.max()) for sets in checked.values() for values in sets.values())
    # The entropy of a certain prediction can be -1e-8.
    edges = torch.linspace(0, largest if largest > 0 else 1.0, bins + 1, dtype=torch.float64)
    figure = Figure(figsize=(PANEL_WIDTH * len(entropies) + 0.4, 3.6), dpi=DPI, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(entropies), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (name, sets) in zip(panels, checked.items(), strict=True):
        draw_histograms(axes, sets, edges)
        axes.legend(frameon=False, loc="upper right")
        axes.set(title=name, xlabel="Entropy [nats]", xlim=(0, 1.03 * edges[-1].item()))
    panels[0].set_ylabel("Fraction of the set [%]")
    return figure
