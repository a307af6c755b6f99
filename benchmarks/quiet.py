"""Training that shows nothing but what a benchmark prints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, Trainer

_LOGGERS = ("lightning.pytorch", "lightning_utilities")
_REMARKS = (  # on loaders and versions, which a benchmark has chosen as they are
    ".*does not have many workers.*",
    "The number of training batches.*",
    "You defined a `validation_step` but have no.*",
    "Total length of .* across ranks is zero.*",
    ".*LeafSpec.*is deprecated",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's log and its remarks, inside; what this package warns of is shown."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for remark in _REMARKS:
                warnings.filterwarnings("ignore", message=remark)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def quiet_trainer(
    callbacks: Iterable[Callback | None], epochs: int, accelerator: str = "cpu", **options: Any
) -> Trainer:
    """Build a trainer on one device that writes nothing.

    Args:
        callbacks: Beside the training; None is left out.
        epochs: How often every example is seen.
        accelerator: Kind of the device.
        **options: Of the trainer, such as ``gradient_clip_val``.

    Returns:
        The trainer, to be used in `quiet`.
    """
    return Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=epochs,
        callbacks=[each for each in callbacks if each is not None],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
