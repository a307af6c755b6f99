"""When SWAG collects weights: at the ends of the last epochs, or within the epoch of a fit that has one or ends by steps."""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer

from lightning_bayes.callbacks.trainer.neighbours import callbacks_of


class CollectionTimes(NamedTuple):
    """The times of one fit.

    Attributes:
        start: Fraction of the fit after which collection starts.
        every: Epochs between two collections.
        parts: Number of collections in a fit of fewer than two epochs.
        epochs: Number of epochs of the fit; 0 if it is less than two, or unknown.
    """

    start: float
    every: int
    parts: int
    epochs: int

    def after_epoch(self, epoch: int) -> bool:
        """Whether to collect after an epoch; counts backwards from the last epoch, which is always collected."""
        return self.is_late_epoch(epoch) and (self.epochs - 1 - epoch) % self.every == 0

    def is_late_epoch(self, epoch: int) -> bool:
        """Whether an epoch comes after the start, which is in the second-last epoch at the latest."""
        return bool(self.epochs) and epoch >= min(self.start * self.epochs, self.epochs - 2)

    def after_update(self, trainer: Trainer, collected: int) -> bool:
        """Whether to collect after an update of a fit without epochs, after `collected` collections."""
        due = self.start + (1 - self.start) * (collected + 1) / self.parts
        return not self.epochs and progress_of(trainer) >= min(due, 1.0)

    def is_late(self, trainer: Trainer) -> bool:
        """Whether the fit is past the start."""
        if self.epochs:
            return self.is_late_epoch(trainer.current_epoch)
        return progress_of(trainer) >= self.start


def epochs_of(trainer: Trainer) -> int:
    """The number of epochs of a fit; 0 if it ends within the second one, or by time."""
    counts = [trainer.max_epochs] if (trainer.max_epochs or -1) > 0 else []
    if trainer.max_steps > 0:
        counts.append(math.ceil(trainer.max_steps / updates_of_epoch(trainer)))
    fewest = min((count for count in counts if count is not None), default=0)
    return fewest if fewest > 1 and not _timers(trainer) else 0


def updates_of_epoch(trainer: Trainer) -> float:
    """The number of updates of an epoch, which may be infinite."""
    batches = float(trainer.num_training_batches)
    return batches if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)


def progress_of(trainer: Trainer) -> float:
    """The fraction of the fit that is done, by the limit that will end it."""
    done = [0.0]
    if trainer.max_steps > 0:
        done.append(trainer.global_step / trainer.max_steps)
    if (trainer.max_epochs or -1) > 0 and not math.isinf(updates_of_epoch(trainer)):
        done.append(trainer.global_step / (updates_of_epoch(trainer) * (trainer.max_epochs or 1)))
    for timer in _timers(trainer):
        elapsed, left = timer.time_elapsed(), timer.time_remaining() or 0.0
        done.append(elapsed / max(elapsed + left, 1e-9))
    return max(done)


def _timers(trainer: Trainer) -> list[Timer]:
    return [timer for timer in callbacks_of(trainer, Timer) if timer.time_remaining() is not None]
