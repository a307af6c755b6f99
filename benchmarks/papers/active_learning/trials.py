"""The trials: labelled rows, test rows and pool of an active and a random learner."""

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
    """Rows of 2 T models: T active learners, which label the row of largest predictive variance, then T random learners."""

    stored: UCISet
    labelled: Tensor
    test: Tensor
    pool: Tensor
    generator: Generator

    @classmethod
    def draw(cls, stored: UCISet, count: int, seed: int = 0) -> Trials:
        """Draw `count` trials; both learners of a trial start from the same rows."""
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
        """Training and test rows of each model, standardised with its labelled rows."""
        return stack_splits(self.stored, list(zip(self.labelled, self.test, strict=True)))

    def pool_inputs(self) -> Tensor:
        """The pool's rows under each model's standardisation, ``[2 T, p, D + 1]``."""
        return stack_splits(self.stored, list(zip(self.labelled, self.pool, strict=True))).test.inputs

    def label(self, variances: Tensor) -> None:
        """Label one row of each model's pool; active learners select by predictive variances ``[2 T, p]``."""
        active = torch.stack([top_rows(row, 1)[0] for row in variances[: self.count]])
        drawn = torch.randint(self.pool.shape[1], (self.count,), generator=self.generator)
        chosen = torch.cat([active, drawn])[:, None]
        self.labelled = torch.cat([self.labelled, self.pool.gather(1, chosen)], 1)
        remains = torch.ones_like(self.pool, dtype=torch.bool).scatter_(1, chosen, False)
        self.pool = self.pool[remains].view(len(self.pool), -1)
