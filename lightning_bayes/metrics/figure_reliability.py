"""The reliability diagram: accuracy against confidence, and how often each confidence occurs."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from lightning_bayes.metrics.calibration import ReliabilityBins, expected_calibration_error, reliability_bins
from lightning_bayes.metrics.figure_style import BLUE, DPI, GREY, ORANGE, PANEL_WIDTH, check_not_empty, quiet_frame
from lightning_bayes.metrics.states import DEFAULT_BINS


def reliability_diagram(curves: Mapping[str, tuple[Tensor, Tensor]], bins: int = DEFAULT_BINS) -> Figure:
    """Draw one reliability diagram per model, side by side with shared axes. Calibrated bars end on the diagonal.

    The upper panels show the accuracy per confidence bin, and the gap to the bin's mean confidence as hatched bars. The
    lower panels show the fraction of examples per bin. Each title gives the ECE over the same bins.

    Args:
        curves: For each model, its class probabilities, ``[batch, classes]``, and the class indices, ``[batch]``.
        bins: Number of bins of equal width.

    Returns:
        A figure of ``2 * len(curves)`` axes: the diagrams first, then the histograms.
    """
    check_not_empty(curves, "model with its (probs, targets)")
    figure = Figure(
        figsize=(PANEL_WIDTH * len(curves) + 0.4, 5.2), dpi=DPI, layout=ConstrainedLayoutEngine(wspace=0.05)
    )
    grid = figure.subplots(2, len(curves), squeeze=False, sharex=True, sharey="row", height_ratios=[3, 1])
    for (name, (probs, targets)), upper, lower in zip(curves.items(), grid[0], grid[1], strict=True):
        reliability = ReliabilityBins(*(column.cpu() for column in reliability_bins(probs, targets, bins)))
        _draw_accuracy(upper, reliability)
        _draw_histogram(lower, reliability)
        upper.set_title(f"{name}\nECE {100 * expected_calibration_error(probs, targets, bins):.1f} %")
    grid[0, 0].set_ylabel("Accuracy [%]")
    grid[1, 0].set_ylabel("Examples [%]")
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=min(3, 2 * len(curves) - 1)
    )
    return figure


def _draw_accuracy(axes: Axes, reliability: ReliabilityBins) -> None:
    edges, width = _percent_edges(reliability)
    accuracy = 100 * reliability.accuracy.numpy()  # nan for empty bins, which are not drawn
    confidence = 100 * reliability.confidence.numpy()
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
    axes.plot([0, 100], [0, 100], color="black", linestyle="--", label="perfect calibration")
    axes.set(xlim=(0, 100), ylim=(0, 100))
    quiet_frame(axes)


def _draw_histogram(axes: Axes, reliability: ReliabilityBins) -> None:
    edges, width = _percent_edges(reliability)
    percent = 100 * (reliability.counts / reliability.counts.sum()).numpy()
    axes.bar(edges, percent, width, align="edge", color=GREY, edgecolor="white")
    axes.set(xlabel="Confidence [%]", ylim=(0, 100))
    quiet_frame(axes)


def _percent_edges(reliability: ReliabilityBins) -> tuple[list[float], float]:
    """Left edges and width of the bins, in percent."""
    bins = len(reliability.counts)
    return [100 * index / bins for index in range(bins)], 100 / bins
