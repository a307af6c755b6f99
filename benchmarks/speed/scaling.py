"""Cost of a step by batch size: seconds and peak added memory for batches of 8 to 512.

    python -m benchmarks.speed.scaling [--models lenet resnet18] [--methods adam vogn-fused] [--batch 8 16 … 512]
        [--rounds 7] [--threads 2] [--device cpu|cuda] [--workspace MIB] [--json FILE] [--plot FILE.png]

Seconds should be linear in the batch size, and memory should grow only with the activations, because the workspace for
per-example values is limited. R² of the least-squares line measures the linearity.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.provenance import save_json
from benchmarks.speed.methods import METHODS, silence_known_warnings
from benchmarks.speed.models import MODELS
from benchmarks.speed.setting import add_arguments, read_setting
from benchmarks.speed.step import Row, in_words, run_all
from lightning_bayes.metrics.figure_style import DPI, PANEL_WIDTH, SERIES, quiet_frame

BATCHES = (8, 16, 32, 64, 128, 256, 512)


def straightness(batches: list[int], values: list[float]) -> tuple[float, float, float]:
    """Fit a least-squares line to values over batch sizes.

    Args:
        batches: Batch sizes, at least two of them different.
        values: One value per batch size.

    Returns:
        Intercept, slope per example, and R².

    Example:
        >>> [round(v, 6) for v in straightness([1, 2, 3], [3.0, 5.0, 7.0])]
        [1.0, 2.0, 1.0]
    """
    slope, intercept = np.polyfit(batches, values, 1)
    residual = np.asarray(values) - (intercept + slope * np.asarray(batches))
    total = np.asarray(values) - np.mean(values)
    return float(intercept), float(slope), float(1 - residual @ residual / (total @ total))


def series(rows: list[Row], model: str, method: str, key: str) -> tuple[list[int], list[float]]:
    """Batch sizes and values of one line in the plot."""
    runs = [r for r in rows if (r["model"], r["method"]) == (model, method) and r.get(key) is not None]
    return [r["batch"] for r in runs], [r[key] for r in runs]


def fits(rows: list[Row]) -> list[dict[str, Any]]:
    """Lines fitted to the seconds of every model and method that ran at three or more batch sizes."""
    lines = []
    for model, method in dict.fromkeys((r["model"], r["method"]) for r in rows):
        batches, seconds = series(rows, model, method, "seconds")
        if len(batches) >= 3:
            intercept, slope, r2 = straightness(batches, seconds)
            line = {"seconds": intercept, "seconds_per_example": slope, "r2": r2}
            lines.append({"model": model, "method": method, **line})
    return lines


def draw(rows: list[Row]) -> Figure:
    """Plot seconds and peak added memory over the batch size, one row of panels per model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(2 * PANEL_WIDTH, 0.8 * PANEL_WIDTH * len(models)), dpi=DPI, layout="constrained")
    grid = figure.subplots(len(models), 2, squeeze=False)
    for model, (left, right) in zip(models, grid, strict=True):
        _panel(left, rows, model, "seconds", "milliseconds a step", 1e3)
        _panel(right, rows, model, "added_mib", "peak added MiB", 1.0)
    grid[0][0].legend(frameon=False)
    return figure


def _panel(axes: Axes, rows: list[Row], model: str, key: str, label: str, factor: float) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for method, colour in zip(methods, SERIES, strict=False):
        batches, values = series(rows, model, method, key)
        axes.plot(batches, [factor * v for v in values], "o-", color=colour, label=METHODS[method].title, markersize=4)
    axes.set(title=MODELS[model].title, xlabel="batch size", ylabel=label, xlim=(0, None), ylim=(0, None))
    quiet_frame(axes)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet", "resnet18"], choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=["adam", "vogn-fused"], choices=METHODS)
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true", help="measure time only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.set_defaults(clock="wall")
    add_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Print the rows and the fitted lines; write JSON and a plot if requested."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    setting = read_setting(parser, options)
    silence_known_warnings()
    rows: list[Row] = []
    for new_rows in run_all(options, setting):
        print("\n".join(in_words(row, options.rounds) for row in new_rows), flush=True)
        rows += new_rows
    for fit in fits(rows):
        print("{model:18} {method:15} {seconds:.4f} s + {seconds_per_example:.6f} s × batch, R² {r2:.4f}".format(**fit))
    header = {**setting.describe(), "rounds": options.rounds}
    save_json(options.json, {**header, "results": rows, "fits": fits(rows)})
    if options.plot:
        draw(rows).savefig(options.plot)


if __name__ == "__main__":
    main()
