"""The reliability diagram: accuracy against confidence, and how often each confidence occurs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from lightning_bayes.metrics.calibration import ReliabilityBins, expected_calibration_error, reliability_bins
from lightning_bayes.metrics.figure_style import BLUE, DPI, GREY, ORANGE, PANEL_WIDTH, check_not_empty, quiet_frame
from lightning_bayes.metrics.states import DEFAULT_BINS

_LINE = 0.01  # of a bar, as a fraction of the axis


def reliability_diagram(curves: Mapping[str, tuple[Tensor, Tensor]], bins: int = DEFAULT_BINS) -> Figure:
    """Draw one reliability diagram per model, side by side with shared axes, and one for models that look the same.

    Calibrated bars end on the diagonal. The upper panels show the accuracy per confidence bin, and the gap to the bin's mean
    confidence as hatched bars. The lower panels show the fraction of examples per bin. Each title gives the ECE over the
    same bins.

    Args:
        curves: For each model, its class probabilities, ``[batch, classes]``, and the class indices, ``[batch]``.
        bins: Number of bins of equal width.

    Returns:
        A figure of two axes for each diagram: the diagrams first, then the histograms.
    """
    check_not_empty(curves, "model with its (probs, targets)")
    curves = _merged(curves, bins)
    figure = Figure(
        figsize=(PANEL_WIDTH * len(curves) + 0.4, 5.2), dpi=DPI, layout=ConstrainedLayoutEngine(wspace=0.05)
    )
    grid = figure.subplots(2, len(curves), squeeze=False, sharex=True, sharey="row", height_ratios=[3, 1])
    for (name, (probs, targets)), upper, lower in zip(curves.items(), grid[0], grid[1], strict=True):
        reliability = ReliabilityBins(*(column.cpu() for column in reliability_bins(probs, targets, bins)))
        _draw_accuracy(upper, reliability)
        _draw_histogram(lower, reliability)
        upper.set_title(f"{name}\nECE {expected_calibration_error(probs, targets, bins):.4f}")
    grid[0, 0].set_ylabel("Accuracy")
    grid[1, 0].set_ylabel("Examples")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(curves), frameon=False)
    return figure


def _merged(curves: Mapping[str, tuple[Tensor, Tensor]], bins: int) -> dict[str, tuple[Tensor, Tensor]]:
    """The curves, with one entry for those whose diagrams look the same."""
    shown: list[tuple[list[str], tuple[Tensor, Tensor], ReliabilityBins]] = []
    for name, curve in curves.items():
        drawn = reliability_bins(*curve, bins)
        same = next((names for names, _, other in shown if _looks_like(drawn, other)), None)
        if same is None:
            shown.append(([name], curve, drawn))
        else:
            same.append(name)
    return {" and ".join(names): curve for names, curve, _ in shown}


def _looks_like(first: ReliabilityBins, second: ReliabilityBins) -> bool:
    """Whether no bar of two diagrams differs by more than its line is wide."""
    pairs = [(first.accuracy, second.accuracy), (first.confidence, second.confidence)]
    pairs.append((first.counts / first.counts.sum(), second.counts / second.counts.sum()))
    return all(bool(torch.allclose(a.float(), b.float(), rtol=0, atol=_LINE, equal_nan=True)) for a, b in pairs)


def _draw_accuracy(axes: Axes, reliability: ReliabilityBins) -> None:
    edges, width = _edges(reliability)
    accuracy = reliability.accuracy.numpy()  # nan for empty bins, which are not drawn
    confidence = reliability.confidence.numpy()
    axes.bar(edges, accuracy, width, align="edge", color=BLUE, edgecolor="white", label="accuracy")
    axes.bar(
        edges,
        confidence - accuracy,
        width,
        bottom=accuracy,
        align="edge",
        facecolor="none",
        edgecolor=ORANGE,
        hatch="////",
        label="gap to the mean confidence",
    )
    axes.plot([0, 1], [0, 1], color="black", linestyle="--", label="perfect calibration")
    axes.set(xlim=(0, 1), ylim=(0, 1))
    quiet_frame(axes)


def _draw_histogram(axes: Axes, reliability: ReliabilityBins) -> None:
    edges, width = _edges(reliability)
    fractions = (reliability.counts / reliability.counts.sum()).numpy()
    axes.bar(edges, fractions, width, align="edge", color=GREY, edgecolor="white")
    axes.set(xlabel="Confidence", ylim=(0, 1))
    quiet_frame(axes)


def _edges(reliability: ReliabilityBins) -> tuple[list[float], float]:
    """Left edges and width of the bins."""
    bins = len(reliability.counts)
    return [index / bins for index in range(bins)], 1 / bins
