"""A pool for active learning: the training set of another data module, of which a growing part is labelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_bayes.errors import DataError, HyperparameterError

Rows = Sequence[int] | Tensor
_EMPTY = "The pool is empty: all {} rows are labelled. Stop here, or add rows."


@final
class PoolDataModule(LightningDataModule):
    """Trains on the labelled rows of a set, predicts the others, and labels what an acquisition chooses.

    ``trainer.fit`` sees the labelled rows, whose number is N for a callback with a posterior. ``trainer.predict`` sees the
    unlabelled rows in a fixed order; positions in it are what `label` takes. Validation and test are those of the source.
    A checkpoint keeps which rows are labelled.

    Args:
        source: The data module whose training rows are the pool. An augmentation of it applies to all of its rows.
        initial: Rows of its training set that are labelled at the start, or their number, drawn at random.
        batch_size: Examples per training batch.
        pool_batch_size: Examples per batch of the unlabelled rows.
        seed: Seed of the random draws, also of `draw`.

    Raises:
        HyperparameterError: If a batch size is below 1.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> rows = TensorDataset(torch.arange(6.0)[:, None], torch.tensor([0, 1, 0, 1, 0, 1]))
        >>> pool = PoolDataModule(LightningDataModule.from_datasets(rows), initial=[0, 1])
        >>> pool.setup("fit")
        >>> pool.label([3])  # position 3 of the rows 2, 3, 4, 5
        >>> pool.labelled, pool.unlabelled
        ([0, 1, 5], [2, 3, 4])
    """

    def __init__(
        self,
        source: LightningDataModule,
        initial: int | Sequence[int] = 20,
        batch_size: int = 32,
        pool_batch_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(batch_size, pool_batch_size) < 1:
            raise HyperparameterError(
                f"batch_size={batch_size} and pool_batch_size={pool_batch_size} must be at least 1."
            )
        self.source, self.initial = source, initial
        self.batch_size, self.pool_batch_size = batch_size, pool_batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self.labelled: list[int] = []

    def prepare_data(self) -> None:
        """Prepare the source."""
        self.source.prepare_data()

    def setup(self, stage: str) -> None:
        """Set the source up and label the first rows; a second call changes nothing.

        Args:
            stage: Handed to the source, whose training set is needed for every stage.
        """
        if hasattr(self, "rows"):
            return
        for needed in dict.fromkeys(("fit", stage)):
            self.source.setup(needed)
        self.rows: Dataset[Any] = self.source.train_dataloader().dataset
        if not self.labelled:  # a checkpoint has not said which
            self.labelled = self._first()

    def _first(self) -> list[int]:
        total = len(self.rows)  # type: ignore[arg-type]
        if isinstance(self.initial, int):
            drawn: list[int] = torch.randperm(total, generator=self.generator)[: max(self.initial, 0)].tolist()
            first = drawn
        else:
            first = [int(row) for row in self.initial]
        asked = self.initial if isinstance(self.initial, int) else len(set(first))
        if not first or asked != len(first) or not all(0 <= row < total for row in first):
            raise HyperparameterError(
                f"initial={self.initial} does not fit a training set of {total} rows. Give different rows from 0 to "
                f"{total - 1}, or their number, at least 1."
            )
        return first

    @property
    def unlabelled(self) -> list[int]:
        """Rows of the training set that are not labelled, in order."""
        known = set(self.labelled)
        return [row for row in range(len(self.rows)) if row not in known]  # type: ignore[arg-type]

    def label(self, positions: Rows) -> None:
        """Move rows of the pool to the training rows.

        Args:
            positions: Positions in `unlabelled`, such as `batch_bald` returns for the predictions of the pool.

        Raises:
            DataError: If the pool is empty.
            HyperparameterError: If there is no such position, or one is given twice.
        """
        left, chosen = self.unlabelled, [int(position) for position in positions]
        if not left:
            raise DataError(_EMPTY.format(len(self.labelled)))
        wrong = [position for position in chosen if not 0 <= position < len(left)]
        if wrong or len(set(chosen)) < len(chosen):
            raise HyperparameterError(
                f"The positions {wrong or chosen} cannot be labelled: the pool has {len(left)} rows, each once. Give "
                f"different positions from 0 to {len(left) - 1}; they change with every call."
            )
        self.labelled += [left[position] for position in chosen]

    def draw(self, size: int) -> Tensor:
        """Positions of random rows of the pool: what an acquisition has to beat.

        Args:
            size: How many; all that are left if there are fewer.

        Returns:
            ``[size]``.
        """
        return torch.randperm(len(self.unlabelled), generator=self.generator)[:size]

    def train_dataloader(self) -> DataLoader[Any]:
        """The labelled rows, shuffled by torch's global generator.

        Returns:
            A loader of the source's examples.

        Raises:
            DataError: If all labels are one class.
        """
        if self._is_one_class():
            raise DataError(
                f"All {len(self.labelled)} labelled rows are of class {int(self.rows[self.labelled[0]][1])}, so there is "
                "nothing to tell apart. Label more rows, or choose another seed or other initial rows."
            )
        return DataLoader(Subset(self.rows, self.labelled), self.batch_size, shuffle=True)

    def _is_one_class(self) -> bool:
        first = torch.as_tensor(self.rows[self.labelled[0]][1])
        is_class = first.numel() == 1 and not first.is_floating_point()
        return is_class and all(int(self.rows[row][1]) == int(first) for row in self.labelled)

    def pool_dataloader(self) -> DataLoader[Any]:
        """The unlabelled rows in order.

        Returns:
            A loader of the source's examples.

        Raises:
            DataError: If the pool is empty.
        """
        left = self.unlabelled
        if not left:
            raise DataError(_EMPTY.format(len(self.labelled)))
        return DataLoader(Subset(self.rows, left), self.pool_batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The loader of the unlabelled rows.

        Returns:
            As `pool_dataloader`.
        """
        return self.pool_dataloader()

    def val_dataloader(self) -> Any:
        """The source's; an empty list if it has none."""
        has_own = is_overridden("val_dataloader", self.source, LightningDataModule)
        return self.source.val_dataloader() if has_own else []

    def test_dataloader(self) -> Any:
        """The source's."""
        return self.source.test_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """The labelled rows, and the state of the random draws."""
        return {"labelled": list(self.labelled), "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Args:
            state_dict: The pool's part of a checkpoint.
        """
        self.labelled = list(state_dict["labelled"])
        self.generator.set_state(state_dict["generator"])
