"""Learning curves with standard errors over seeds, and a strip of frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.line_figure import line_figure
from benchmarks.papers.exploration.explorers import METHODS
from benchmarks.papers.exploration.report import Results, mean_and_error
from lightning_bayes.metrics.figure_style import BLUE, DPI, GREEN, ORANGE

_COLOURS = {"vadam": BLUE, "vadagrad": BLUE, "sgd": ORANGE, "adam": GREEN}
_DASHED = ("vadagrad", "sgd_plain", "adam_plain")


def draw_curves(results: Results, path: Path) -> None:
    """Plot the test return over time steps: mean over seeds with a band of one standard error."""
    with line_figure(path, (6.4, 4.0), fontsize=8) as axes:
        for name, result in results.items():
            colour = _COLOURS.get(name) or _COLOURS[name.partition("_")[0]]
            means, errors = zip(*map(mean_and_error, result["returns"]), strict=True)
            low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
            style = "--" if name in _DASHED else "-"
            axes.plot(result["steps"], means, style, color=colour, label=METHODS[name].title)
            axes.fill_between(result["steps"], low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set(xlabel="time steps", ylabel="test return, mean ± standard error over seeds")


def draw_strip(frames: Sequence[Any], labels: Sequence[str], title: str, path: Path) -> None:
    """Draw frames side by side.

    Args:
        frames: RGB arrays.
        labels: Labels below the frames.
        title: Title of the figure.
        path: Output file; the suffix selects the format.
    """
    figure = Figure(figsize=(1.9 * len(frames), 2.4), dpi=DPI, layout="constrained")
    for axes, frame, label in zip(figure.subplots(1, len(frames), squeeze=False).flat, frames, labels, strict=True):
        axes.imshow(frame)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(label, fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)
