"""A pool for active learning: the training set of another data module, with a growing labelled subset."""

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


@final
class PoolDataModule(LightningDataModule):
    """Trains on labelled rows, predicts unlabelled rows, and labels the rows that an acquisition function chooses.

    ``trainer.fit`` uses the labelled rows; their number is N for callbacks with a posterior. ``trainer.predict`` uses the
    unlabelled rows in a fixed order; `label` takes positions in this order. The source provides validation and test data.
    Checkpoints store which rows are labelled.

    Args:
        source: The data module whose training set is the pool. Its augmentation applies to all rows.
        initial: The initial labelled rows of the training set, or their number, to be drawn at random.
        batch_size: Examples per training batch.
        pool_batch_size: Examples per batch of unlabelled rows.
        seed: Seed of the initial rows and of `draw`.

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
        """Set up the source and choose the initial labelled rows. Repeated calls do nothing.

        Args:
            stage: Passed to the source, in addition to ``fit``, because the pool needs the training set at every stage.
        """
        if hasattr(self, "rows"):
            return
        for source_stage in dict.fromkeys(("fit", stage)):
            self.source.setup(source_stage)
        self.rows: Dataset[Any] = self.source.train_dataloader().dataset
        if not self.labelled:  # not restored from a checkpoint
            self.labelled = self._initial_rows()

    def _initial_rows(self) -> list[int]:
        total = len(self.rows)  # type: ignore[arg-type]
        if isinstance(self.initial, int):
            rows: list[int] = torch.randperm(total, generator=self.generator)[: max(self.initial, 0)].tolist()
            requested = self.initial
        else:
            rows = [int(row) for row in self.initial]
            requested = len(set(rows))
        if not rows or requested != len(rows) or not all(0 <= row < total for row in rows):
            raise HyperparameterError(
                f"initial={self.initial} does not fit a training set of {total} rows. Pass unique rows from 0 to "
                f"{total - 1}, or their number, at least 1."
            )
        return rows

    @property
    def unlabelled(self) -> list[int]:
        """The unlabelled rows of the training set, in order."""
        labelled = set(self.labelled)
        return [row for row in range(len(self.rows)) if row not in labelled]  # type: ignore[arg-type]

    def label(self, positions: Rows) -> None:
        """Label rows of the pool; raises DataError if it is empty.

        Args:
            positions: Positions in `unlabelled`, for example from `batch_bald` on the predictions of the pool.

        Raises:
            HyperparameterError: If positions are out of range or not unique.
        """
        unlabelled, chosen = self._nonempty_pool(), [int(position) for position in positions]
        invalid = [position for position in chosen if not 0 <= position < len(unlabelled)]
        if invalid or len(set(chosen)) < len(chosen):
            raise HyperparameterError(
                f"Cannot label the positions {invalid or chosen} of a pool of {len(unlabelled)} rows. Pass unique positions "
                f"from 0 to {len(unlabelled) - 1}; positions change with every call."
            )
        self.labelled += [unlabelled[position] for position in chosen]

    def _nonempty_pool(self) -> list[int]:
        unlabelled = self.unlabelled
        if not unlabelled:
            raise DataError(f"The pool is empty: all {len(self.labelled)} rows are labelled. Stop, or add rows.")
        return unlabelled

    def draw(self, size: int) -> Tensor:
        """Up to `size` random positions of the pool, the baseline for acquisition functions."""
        return torch.randperm(len(self.unlabelled), generator=self.generator)[:size]

    def train_dataloader(self) -> DataLoader[Any]:
        """The labelled rows, shuffled by torch's global generator; raises DataError if they all have the same class."""
        if self._is_one_class():
            raise DataError(
                f"All {len(self.labelled)} labelled rows are of class {int(self.rows[self.labelled[0]][1])}, so there is "
                "nothing to distinguish. Label more rows, or change the seed or the initial rows."
            )
        return DataLoader(Subset(self.rows, self.labelled), self.batch_size, shuffle=True)

    def _is_one_class(self) -> bool:
        first = torch.as_tensor(self.rows[self.labelled[0]][1])
        is_class = first.numel() == 1 and not first.is_floating_point()
        return is_class and all(int(self.rows[row][1]) == int(first) for row in self.labelled)

    def pool_dataloader(self) -> DataLoader[Any]:
        """The unlabelled rows in order; raises DataError if the pool is empty."""
        return DataLoader(Subset(self.rows, self._nonempty_pool()), self.pool_batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The unlabelled rows, as in `pool_dataloader`."""
        return self.pool_dataloader()

    def val_dataloader(self) -> Any:
        """The validation loader of the source; an empty list if it has none."""
        has_validation = is_overridden("val_dataloader", self.source, LightningDataModule)
        return self.source.val_dataloader() if has_validation else []

    def test_dataloader(self) -> Any:
        """The test loader of the source."""
        return self.source.test_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """The labelled rows and the state of the random generator."""
        return {"labelled": list(self.labelled), "generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.labelled = list(state_dict["labelled"])
        self.generator.set_state(state_dict["generator"])
