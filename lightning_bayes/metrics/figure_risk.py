"""The risk-coverage diagram: the error rate of a model on the inputs with the highest confidence."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor

from lightning_bayes.metrics.figure_style import DPI, check_not_empty, line_style, quiet_frame
from lightning_bayes.metrics.selective import aurc, risk_coverage

FIRST_POINT = 0.02  # smallest coverage drawn; below it, single errors among few answers make the curve jump


def risk_coverage_diagram(curves: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Draw the fraction of errors against the fraction of answered inputs, one line per model.

    Lower is better. The right end is the model's error rate on all inputs. The legend gives the AURC.

    Args:
        curves: For each model, its class probabilities, ``[batch, classes]``, and the class indices, ``[batch]``.

    Returns:
        A figure of one axes.

    Example:
        >>> import torch
        >>> probs, targets = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])
        >>> figure = risk_coverage_diagram({"VOGN": (probs, targets)})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['VOGN, AURC 25.00 %']
    """
    check_not_empty(curves, "model with its (probs, targets)")
    figure = Figure(figsize=(5.2, 3.8), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for index, (name, (probs, targets)) in enumerate(curves.items()):
        coverage, risk = (column.cpu() for column in risk_coverage(probs, targets))
        shown = coverage >= min(FIRST_POINT, float(coverage[-1]))
        axes.plot(
            100 * coverage[shown].numpy(),
            100 * risk[shown].numpy(),
            label=f"{name}, AURC {100 * aurc(probs, targets):.2f} %",
            **line_style(index),
        )
    axes.set(xlabel="Coverage: inputs answered [%]", ylabel="Risk: wrong answers [%]", xlim=(0, 100))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    quiet_frame(axes)
    return figure
