"""What callbacks do when a fit ends: whether it ends now, and errors that must not lose it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.callbacks.trainer.neighbours import callbacks_of


def is_last_epoch(trainer: Trainer) -> bool:
    """Whether the epoch that ends now is the last one of the fit."""
    has_all_steps = 0 <= trainer.max_steps <= trainer.global_step
    return trainer.should_stop or has_all_steps or trainer.current_epoch + 1 == trainer.max_epochs


def may_be_last_validation(trainer: Trainer) -> bool:
    """Whether the fit may end without another validation: `EarlyStopping` decides after one."""
    interval, epochs = trainer.check_val_every_n_epoch or 1, trainer.max_epochs or -1
    has_no_other = 0 < epochs <= trainer.current_epoch + interval
    return bool(callbacks_of(trainer, EarlyStopping)) or has_no_other or is_last_epoch(trainer)


@contextmanager
def fit_kept(callback: str, result: str) -> Iterator[None]:
    """Turn an error at the end of a fit into a warning, because Lightning writes the last checkpoint afterwards."""
    try:
        yield
    except Exception as error:  # whatever the user's data or module raise
        if isinstance(error, Warning):  # the user asked for an error
            raise
        rank_zero_warn(
            f"{callback} did not find {result} at the end of the fit: {type(error).__name__}: {error} The fit and its "
            "checkpoints are kept without it; a test or prediction from a checkpoint tries again."
        )
