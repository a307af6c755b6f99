"""The score of each example of a test, in a file, and how the scores of two tests on the same examples differ.

    Δ = mean_i (a_i - b_i)        se(Δ) = sqrt(Var_i(a_i - b_i) / N)

a and b are the scores of example i in both tests.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Final, NamedTuple

import torch
from torch import Tensor

from lightning_bayes.metrics.paired import PairedClassification
from lightning_bayes.metrics.scoring import nll_per_example
from lightning_bayes.metrics.top_label import top_label

SCORES_FILE: Final = "scores.csv"
_TARGET: Final = "target"
_CONFIDENCE: Final = "confidence"
_ECE: Final = "cal/ECE"


class Difference(NamedTuple):
    """The mean of a score in one test minus that in another."""

    value: float
    error: float  # standard error


def write_scores(path: Path, probs: Tensor, targets: Tensor) -> None:
    """Write target, accuracy (0 or 1), NLL and confidence of each example, from probabilities ``[examples, classes]``."""
    confidence, correct = top_label(probs, targets)
    columns = (targets, correct.int(), nll_per_example(probs, targets), confidence)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([_TARGET, "cls/Acc", "cls/NLL", _CONFIDENCE])
        writer.writerows(zip(*(column.tolist() for column in columns), strict=True))


def paired_differences(first: Path, other: Path) -> dict[str, Difference]:
    """For each score, the mean of `other` minus that of `first`; empty if the tests had other examples."""
    ours, theirs = _columns(first), _columns(other)
    if len(ours.get(_TARGET, ())) < 2 or ours[_TARGET] != theirs.get(_TARGET):
        return {}
    shared = [key for key in ours if key in theirs and key not in {_TARGET, _CONFIDENCE}]
    found = {key: _difference(ours[key], theirs[key]) for key in shared}
    return found | (_calibration(ours, theirs) if _CONFIDENCE in ours.keys() & theirs.keys() else {})


def _calibration(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> dict[str, Difference]:
    """The difference of the ECEs; see `PairedClassification`."""
    columns = [[torch.tensor(test[key]) for key in ("cls/Acc", "cls/NLL", _CONFIDENCE)] for test in (theirs, ours)]
    paired = PairedClassification()
    paired.add(*(each for correct, nll, confidence in columns for each in paired.columns(confidence, correct, nll)))
    ece = paired.compute()[_ECE]
    return {_ECE: Difference(ece.first - ece.second, ece.error)}


def _columns(path: Path) -> dict[str, list[float]]:
    with path.open(encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file)
        return {name: list(map(float, column)) for name, column in zip(names, zip(*rows, strict=True), strict=False)}


def _difference(first: Sequence[float], other: Sequence[float]) -> Difference:
    gaps = [b - a for a, b in zip(first, other, strict=True)]
    return Difference(fmean(gaps), stdev(gaps) / math.sqrt(len(gaps)))
