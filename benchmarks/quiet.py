"""Training without the output of Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, Trainer

_LOGGERS = ("lightning.pytorch", "lightning_utilities")
_HINTS = (  # hints about loaders and versions, which benchmarks choose on purpose
    ".*does not have many workers.*",
    "The number of training batches.*",
    "You defined a `validation_step` but have no.*",
    "Total length of .* across ranks is zero.*",
    ".*LeafSpec.*is deprecated",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's log and hints inside the context; warnings of this package are shown."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for hint in _HINTS:
                warnings.filterwarnings("ignore", message=hint)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def quiet_trainer(
    callbacks: Iterable[Callback | None], epochs: int, accelerator: str = "cpu", **options: Any
) -> Trainer:
    """Build a trainer on one device that writes nothing."""
    return Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=epochs,
        callbacks=[callback for callback in callbacks if callback is not None],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
