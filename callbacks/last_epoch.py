"""Whether a fit ends with the current epoch."""

from __future__ import annotations

from lightning.pytorch import Trainer


def is_last_epoch(trainer: Trainer) -> bool:
    """Whether the epoch that ends now is the last one of the fit."""
    has_all_steps = 0 <= trainer.max_steps <= trainer.global_step
    return trainer.should_stop or has_all_steps or trainer.current_epoch + 1 == trainer.max_epochs
