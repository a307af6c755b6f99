"""Whether a fit ends with the present epoch."""

from __future__ import annotations

from lightning.pytorch import Trainer


def is_last_epoch(trainer: Trainer) -> bool:
    """Whether no epoch follows, at the end of an epoch.

    Returns:
        Whether the trainer stops, or has all of its steps or epochs.
    """
    has_all_steps = 0 <= trainer.max_steps <= trainer.global_step
    return trainer.should_stop or has_all_steps or trainer.current_epoch + 1 == trainer.max_epochs
