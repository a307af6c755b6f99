"""Data sets of the papers' logistic regressions, stacked as runs that train in parallel.

    toy            two Gaussians in the plane, as in Murphy 2012 (Fig. 8.6); no file
    usps           digits 3 and 5, 256 pixels                       usps_3vs5.npz              X, y
    breast-cancer  breast-cancer_scale of LIBSVM, 10 features       breast-cancer_scale.npz    X, y
    australian     australian_scale of LIBSVM, 14 features          australian_scale.npz       X, y
    a1a            a1a of LIBSVM, 123 binary features               a1a.npz                    X_tr, y_tr, X_te, y_te

Labels are 0 or 1. All sets except the toy get a column of ones. Each run trains on a different random half; a1a has a fixed
training and test set, so its runs differ only in the noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_bayes.errors import DatasetError

FILES = {
    "usps": "usps_3vs5.npz",
    "breast-cancer": "breast-cancer_scale.npz",
    "australian": "australian_scale.npz",
    "a1a": "a1a.npz",
}
PRIOR_PRECISION = {"toy": 0.01, "usps": 25.0, "breast-cancer": 1.0, "australian": 1e-5, "a1a": 2.8072}  # the papers' λ


class Runs(NamedTuple):
    """Data of R runs: features ``[R, N, D]``, labels ``[R, N]``."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    prior_precision: float

    @property
    def num_data(self) -> int:
        """N, the size of a training set."""
        return self.train_x.shape[1]


def load(name: str, root: Path | None, runs: int, *, same_split: bool = False) -> Runs:
    """Load a data set."""
    generator = np.random.default_rng(0)
    if name == "toy":
        draws = [(*murphys_toy(30, generator), *murphys_toy(300, generator))]
    elif name == "a1a":
        arrays = read(name, root, ("X_tr", "y_tr", "X_te", "y_te"))
        draws = [(with_ones(arrays[0]), arrays[1], with_ones(arrays[2]), arrays[3])]
    else:
        x, y = read(name, root, ("X", "y"))
        draws = [halves(with_ones(x), y, generator) for _ in range(1 if same_split else runs)]
    stacked = [torch.as_tensor(np.stack(part), dtype=torch.float32) for part in zip(*draws, strict=True)]
    return Runs(*(part.expand(runs, *part.shape[1:]) for part in stacked), prior_precision=PRIOR_PRECISION[name])


def murphys_toy(count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`count` points of N((1, 5), 1) with label 1, and of N((-5, 1), 2.2²) with label 0."""
    ones = generator.normal((1, 5), 1.0, (count, 2))
    zeros = generator.normal((-5, 1), 2.2, (count, 2))
    return np.concatenate([ones, zeros]), np.repeat([1.0, 0.0], count)


def read(name: str, root: Path | None, arrays: tuple[str, ...]) -> list[np.ndarray]:
    """Read arrays of a data set by name."""
    path = (root or Path()) / FILES[name]
    if root is None or not path.is_file():
        raise DatasetError(
            f"The data set {name!r} is not at {path}. Pass --root with the folder of {', '.join(FILES.values())} (npz files "
            f"of LIBSVM's sets and of USPS; this one with the arrays {', '.join(arrays)}), or --sets toy."
        )
    with np.load(path) as content:
        missing = [array for array in arrays if array not in content]
        if missing:
            raise DatasetError(f"{path} has no {', '.join(missing)}; it has {', '.join(content)}.")
        return [np.asarray(content[array], dtype=np.float64) for array in arrays]


def with_ones(x: np.ndarray) -> np.ndarray:
    """Append a column of ones, for the bias."""
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def halves(x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """A random half for training and the other for testing."""
    order = generator.permutation(len(x))
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    return x[train], y[train], x[test], y[test]
