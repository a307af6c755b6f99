"""What `VOGNCallback()` gains over the user's own training with a fitted temperature: the first figure of the README.

    python -m benchmarks.defaults.knows [--figure docs/knows.png]

It reads ``benchmarks/results/default_noise_fresh.json`` of `benchmarks.defaults.modes`. Differences are paired over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.over_seeds import standard_error, with_error
from lightning_bayes.metrics.figure_style import BLUE, DPI, GREY, ORANGE

RESULTS = Path("benchmarks/results/default_noise_fresh.json")
PROBLEMS = {  # in the order of the rows
    "fashion-vit": "FashionMNIST, ViT",
    "cifar-vit": "CIFAR-10, ViT",
    "cifar-bn": "CIFAR-10, ResNet",
    "fashion-bn": "FashionMNIST, ResNet",
    "cifar-bn-augmented": "CIFAR-10, ResNet, crops",
    "cifar-vit-augmented": "CIFAR-10, ViT, crops",
    "fashion-vit-short": "FashionMNIST, ViT, short",
    "cifar-bn-short": "CIFAR-10, ResNet, short",
    "cifar-gn": "CIFAR-10, ResNet, GroupNorm",
}
LABELS = ("AdamW with temperature", "VOGNCallback()", "three networks of AdamW")
Record = dict[str, Any]


class Gain(NamedTuple):
    """The scores of both on one problem."""

    user: float  # the mean over seeds, with a temperature
    vogn: float
    error: float  # standard error of the paired difference
    ensemble: float  # three of the user's networks, with a temperature


def gains(records: Sequence[Record], user: str, vogn: str, ensemble: str) -> dict[str, Gain]:
    """For each problem, a score of the user, of VOGN's default and of three networks, by the names of the columns."""
    found = {}
    for problem in PROBLEMS:
        of = _by_method(records, problem)
        seeds = sorted(of["user"].keys() & of["vogn default"].keys())
        pairs = [(of["user"][seed][user], of["vogn default"][seed][vogn]) for seed in seeds]
        error = standard_error([after - before for before, after in pairs])
        three = statistics.mean(record[ensemble] for record in of["ensemble"].values())
        found[problem] = Gain(*(statistics.mean(column) for column in zip(*pairs, strict=True)), error, three)
    return found


def _by_method(records: Sequence[Record], problem: str) -> dict[str, dict[int, Record]]:
    of: dict[str, dict[int, Record]] = {}
    for record in records:
        if record["problem"] == problem:
            of.setdefault(record["method"], {})[record["seed"]] = record
    return of


def _means(found: dict[int, Record]) -> dict[str, float]:
    columns = ("nll", "nll_t", "calibration", "calibration_t", "error_t")
    return {column: statistics.mean(record[column] for record in found.values()) for column in columns}


def figure(detection: dict[str, Gain], nll: dict[str, Gain]) -> Figure:
    """Two panels with a row for each problem."""
    drawn = Figure(figsize=(9.6, 4.4), dpi=DPI, layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    for row, problem in enumerate(PROBLEMS):
        _draw(left, row, detection[problem], lambda value, _: value)
        _draw(right, row, nll[problem], lambda value, gain: value - gain.user)
    left.set(title="Finding inputs unlike the training data", xlabel="OOD AUROC →")
    right.set(title="Predicting labels", xlabel="← NLL, difference [nats]")
    left.set_yticks(range(len(PROBLEMS)), PROBLEMS.values())
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", color="0.9", linewidth=0.8)
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    shown = [name for name in LABELS if name in handles]
    drawn.legend([handles[name] for name in shown], shown, loc="outside lower center", ncols=3, frameon=False)
    return drawn


def _draw(axes: Axes, row: int, gain: Gain, shown: Callable[[float, Gain], float]) -> None:
    user, vogn, three = (shown(value, gain) for value in (gain.user, gain.vogn, gain.ensemble))
    labels = [text if row == 0 else None for text in LABELS]
    axes.plot([user, vogn], [row, row], color=BLUE, alpha=0.25, linewidth=6, zorder=1)
    axes.plot(user, row, "o", color=GREY, label=labels[0])
    axes.errorbar(vogn, row, xerr=gain.error, fmt="o", color=BLUE, elinewidth=1, label=labels[1])
    axes.plot(three, row, "D", color=ORANGE, fillstyle="none", label=labels[2])


def main() -> None:
    """Print the scores of each problem; draw the figure if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    records = json.loads(RESULTS.read_text("utf-8"))["runs"]
    detection = gains(records, "entropy_auroc_t", "mi_auroc", "mi_auroc_t")
    nll = gains(records, "nll_t", "nll", "nll_t")
    for name, found in (("OOD AUROC", detection), ("NLL", nll)):
        for problem, gain in found.items():
            change = with_error(gain.vogn - gain.user, gain.error, sign="+")
            print(f"{name:10} {PROBLEMS[problem]:30} {gain.user:.4f} {change}, three networks {gain.ensemble:.4f}")
    for problem, name in PROBLEMS.items():
        means = {method: _means(found) for method, found in _by_method(records, problem).items()}
        user, three = means["user"], means["ensemble"]
        print(
            f"one temperature: {name:30} NLL {user['nll']:.4f} to {user['nll_t']:.4f}, ECE {user['calibration']:.4f} to "
            f"{user['calibration_t']:.4f}; three networks: error {user['error_t']:.4f} to {three['error_t']:.4f}"
        )
    if options.figure is not None:
        figure(detection, nll).savefig(options.figure)


if __name__ == "__main__":
    main()
