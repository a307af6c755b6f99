"""Curves, one per model: risk against coverage, and metrics against the severity of a distribution shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, check_not_empty, line_style, quiet_frame
from lightning_bayes.metrics.selective import aurc, risk_coverage
from lightning_bayes.metrics.top_label import top_label

FIRST_POINT = 0.02  # smallest coverage drawn; below it, single errors among few answers make the curve jump

# Metric key → axis label.
PANELS = {"cls/Acc": "Accuracy", "cls/NLL": "NLL [nats]", "cal/ECE": "ECE"}


def risk_coverage_diagram(curves: Mapping[str, tuple[Tensor, Tensor]]) -> Figure:
    """Draw the fraction of errors against the fraction of answered inputs, one line per model.

    Lower is better. The right end is the model's error rate on all inputs. The legend gives the AURC.

    Args:
        curves: For each model, its class probabilities, ``[batch, classes]``, and the class indices, ``[batch]``.

    Returns:
        A figure of one axes.
    """
    check_not_empty(curves, "model with its (probs, targets)")
    figure = Figure(figsize=(5.2, 3.8), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for index, (name, (probs, targets)) in enumerate(curves.items()):
        confidences = top_label(probs, targets)
        coverage, risk = (column.cpu() for column in risk_coverage(*confidences))
        shown = coverage >= min(FIRST_POINT, float(coverage[-1]))
        axes.plot(
            coverage[shown].numpy(),
            risk[shown].numpy(),
            label=f"{name}, AURC {aurc(*confidences):.4f}",
            **line_style(index),
        )
    axes.set(xlabel="Coverage: inputs answered", ylabel="Risk: wrong answers", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    quiet_frame(axes)
    return figure


def shift_curves(models: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]) -> Figure:
    """Accuracy, NLL and ECE against the severity of the shift, one line per model, from the values of `by_severity`."""
    # A line is the mean over the kinds of shift; the band spans the lowest and the highest kind.
    check_not_empty(models, "model with its {metric: {severity: values}}")
    figure = Figure(figsize=(PANEL_WIDTH * len(PANELS) + 0.4, 3.6), dpi=DPI, layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for index, (name, curves) in enumerate(models.items()):
            _draw_curve(axes, name, curves[metric], index)
        axes.set(xlabel="Severity of the shift", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        quiet_frame(axes)
    figure.axes[0].legend(frameon=False)
    return figure


def _draw_curve(axes: Axes, name: str, curve: Mapping[int, Sequence[float]], index: int) -> None:
    severities = sorted(curve)
    by_kind = [curve[severity] for severity in severities]
    means = [sum(values) / len(values) for values in by_kind]
    style = line_style(index)
    axes.plot(severities, means, marker="o", markersize=4, label=name, **style)
    lowest, highest = [min(values) for values in by_kind], [max(values) for values in by_kind]
    axes.fill_between(severities, lowest, highest, color=style["color"], alpha=0.15, lw=0)
