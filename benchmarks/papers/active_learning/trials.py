"""The trials: which rows are labelled, tested and left in the pool, for an active and a random learner of each trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Generator, Tensor

from benchmarks.papers.uci.data import Splits, stack_splits
from lightning_bayes.predictive import top_rows
from lightning_bayes.zoo.data.uci import UCISet

NUM_TRAIN: Final = 20
NUM_TEST: Final = 100


@dataclass
class Trials:
    """Rows of 2 T models: first T that label the row of largest predictive variance, then T that label a random one.

    Attributes:
        stored: The set.
        labelled: ``[2 T, n]``.
        test: ``[2 T, m]``.
        pool: ``[2 T, p]``.
        generator: Source of the random choices.
    """

    stored: UCISet
    labelled: Tensor
    test: Tensor
    pool: Tensor
    generator: Generator

    @classmethod
    def draw(cls, stored: UCISet, count: int, seed: int = 0) -> Trials:
        """Draw T trials; both learners of a trial start from the same rows.

        Args:
            stored: The set.
            count: T.
            seed: Of the rows and of the random choices.

        Returns:
            The trials.
        """
        generator = torch.Generator().manual_seed(seed)
        rows = torch.stack([torch.randperm(len(stored.targets), generator=generator) for _ in range(count)]).repeat(
            2, 1
        )
        labelled, test, pool = rows.split([NUM_TRAIN, NUM_TEST, rows.shape[1] - NUM_TRAIN - NUM_TEST], 1)  # type: ignore[no-untyped-call]
        return cls(stored, labelled, test, pool, generator)

    @property
    def count(self) -> int:
        """T."""
        return len(self.labelled) // 2

    def splits(self) -> Splits:
        """What each model trains on and is tested on, standardised by its labelled rows."""
        return stack_splits(self.stored, list(zip(self.labelled, self.test, strict=True)))

    def pool_inputs(self) -> Tensor:
        """The pool's rows under each model's standardisation, ``[2 T, p, D + 1]``."""
        return stack_splits(self.stored, list(zip(self.labelled, self.pool, strict=True))).test.inputs

    def label(self, variances: Tensor) -> None:
        """Move one row of each model's pool to its labelled rows.

        Args:
            variances: Predictive variances of the pool, ``[2 T, p]``; those of the random learners are not looked at.
        """
        active = torch.stack([top_rows(each, 1)[0] for each in variances[: self.count]])
        drawn = torch.randint(self.pool.shape[1], (self.count,), generator=self.generator)
        chosen = torch.cat([active, drawn])[:, None]
        self.labelled = torch.cat([self.labelled, self.pool.gather(1, chosen)], 1)
        kept = torch.ones_like(self.pool, dtype=torch.bool).scatter_(1, chosen, False)
        self.pool = self.pool[kept].view(len(self.pool), -1)
