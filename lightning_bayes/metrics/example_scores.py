"""The score of each example of a test, in a file, and how the scores of two tests on the same examples differ."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from lightning_bayes.metrics.paired import PairedClassification
from lightning_bayes.metrics.scoring import nll_per_example
from lightning_bayes.metrics.top_label import top_label

SCORES_FILE: Final = "scores.csv"
_TARGET: Final = "target"
_SCORES: Final = ("cls/Acc", "cls/NLL", "confidence")


class Difference(NamedTuple):
    """A score of one test minus that of another, see `lightning_bayes.metrics.paired`."""

    value: float
    error: float  # standard error


def write_scores(path: Path, probs: Tensor, targets: Tensor) -> None:
    """Write target, accuracy (0 or 1), NLL and confidence of each example, from probabilities ``[examples, classes]``."""
    confidence, correct = top_label(probs, targets)
    columns = (targets, correct.int(), nll_per_example(probs, targets), confidence)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([_TARGET, *_SCORES])
        writer.writerows(zip(*(column.tolist() for column in columns), strict=True))


def paired_differences(first: Path, other: Path) -> dict[str, Difference]:
    """For each score, the value of `other` minus that of `first`; empty if the tests had other examples."""
    ours, theirs = _columns(first), _columns(other)
    is_complete = {_TARGET, *_SCORES} <= ours.keys() & theirs.keys()
    if not is_complete or len(ours[_TARGET]) < 2 or ours[_TARGET] != theirs[_TARGET]:
        return {}
    tests = [[torch.tensor(test[key]) for key in _SCORES] for test in (theirs, ours)]
    paired = PairedClassification()
    paired.add(*(each for correct, nll, confidence in tests for each in paired.columns(confidence, correct, nll)))
    return {key: Difference(found.first - found.second, found.error) for key, found in paired.compute().items()}


def _columns(path: Path) -> dict[str, list[float]]:
    with path.open(encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file)
        return {name: list(map(float, column)) for name, column in zip(names, zip(*rows, strict=True), strict=False)}
