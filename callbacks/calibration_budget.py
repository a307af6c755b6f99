"""What a calibration at the end of a fit may cost: calls of the network, counted, and not timed.

A count is the same in every process and in a resumed fit.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.callbacks.loaders import sum_over_processes

SHARE: Final = 0.05  # of the calls of the fit
FEWEST_ROWS: Final = 200  # for a choice that is worth its time, where the validation set has as many
_CALLS_OF_A_STEP: Final = 3  # forward and backward, in forward passes


class Budget(NamedTuple):
    """Calls of the network on a batch as large as the fit's, each under one sample."""

    calls: float
    rows_of_batch: float
    others: int = 0  # rows that each evaluation needs beside its own, for BatchNorm statistics

    def batches(self, samples: int) -> int:
        """The number of batches that may be evaluated once under so many samples."""
        return int(self.calls / samples)

    def rows(self, samples: int, evaluations: int = 1) -> int:
        """The number of examples that may be evaluated so often, also in smaller batches."""
        return max(0, int(self.calls * self.rows_of_batch / (samples * evaluations)) - self.others)

    def allows(self, rows: float, samples: int, evaluations: int = 1, fewest: int = FEWEST_ROWS) -> bool:
        """Whether about `fewest` of a set with so many `rows` may be evaluated, or about all if it has fewer."""
        return 1.5 * self.rows(samples, evaluations) >= min(fewest, rows)


def budget_of_fit(trainer: Trainer, rows_of_batch: float, others: int = 0) -> Budget:
    """The budget of the fit that ends now."""
    steps = trainer.fit_loop.total_batch_idx + 1
    return Budget(SHARE * _CALLS_OF_A_STEP * steps, rows_of_batch, others)


def agreed(trainer: Trainer, module: LightningModule, *values: float) -> list[float]:
    """The means of values over processes, which then all decide the same."""
    totals: list[float] = sum_over_processes(trainer, module)(torch.tensor(values)).tolist()
    return [total / trainer.world_size for total in totals]
