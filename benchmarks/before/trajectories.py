"""Compare the trajectories of every optimizer and callback in two trees."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks.house.trees import run_probe

TOLERANCE = 1e-6
Recorded: TypeAlias = dict[str, "Tensor | str"]


class Comparison(NamedTuple):
    """One trajectory in both trees.

    Attributes:
        name: Method, network and arguments.
        difference: Largest difference of any weight in any step; infinite if a tree cannot run it.
        remark: The errors of the trees, if any.
    """

    name: str
    difference: float
    remark: str

    @property
    def is_equal(self) -> bool:
        """Whether the trajectories agree to `TOLERANCE`."""
        return self.difference < TOLERANCE


def record(root: Path) -> Recorded:
    """Record the trajectories of a tree: by name, the weights of every step, or the error of the method."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trajectories.pt")
        run_probe("before/trajectory_probe", root, str(path))
        loaded: Recorded = torch.load(path, weights_only=True)
        return loaded


def compare(before: Recorded, after: Recorded) -> list[Comparison]:
    """Compare the trajectories of two trees; one comparison per trajectory of either tree."""
    missing = "missing"
    return [_compare(name, before.get(name, missing), after.get(name, missing)) for name in {**before, **after}]


def _compare(name: str, before: Tensor | str, after: Tensor | str) -> Comparison:
    if isinstance(before, str) or isinstance(after, str):
        same = isinstance(before, str) and isinstance(after, str) and _kind(before) == _kind(after)
        texts = [text if isinstance(text, str) else "runs" for text in (before, after)]
        return Comparison(name, 0.0 if same else float("inf"), f"before: {texts[0]}; now: {texts[1]}")
    if before.shape != after.shape:
        return Comparison(name, float("inf"), f"before: {tuple(before.shape)}; now: {tuple(after.shape)}")
    difference = (before - after).abs().nan_to_num(nan=float("inf"))
    difference[before.isnan() & after.isnan()] = 0.0
    return Comparison(name, float(difference.max()), "")


def _kind(error: str) -> str:
    return error.partition(":")[0]
