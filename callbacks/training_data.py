"""Training data outside of a fit, for what is measured on them: curvature, BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_bayes.callbacks.validation_set import on_device
from lightning_bayes.errors import UnsupportedTrainingError


def training_loader(trainer: Trainer, module: LightningModule, fitted_on: Any, callback: str) -> Any:
    """The training loader.

    Args:
        trainer: The trainer.
        module: The module.
        fitted_on: The loader of the last fit that the callback has seen; None if it has seen none.
        callback: Name of the callback's class, for the message.

    Returns:
        That of the data module, else of the module, else of the last fit.

    Raises:
        UnsupportedTrainingError: If there is none.
    """
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        datamodule.setup("fit")
        return datamodule.train_dataloader()
    if is_overridden("train_dataloader", module):
        return module.train_dataloader()
    if fitted_on is None:
        raise UnsupportedTrainingError(
            f"{callback} needs training batches, but has seen no fit, and there is no data module. Pass datamodule=..., "
            "give the module a train_dataloader, or let the callback join the fit."
        )
    return fitted_on


@final
class OnDevice:
    """A loader whose batches are as a step would get them.

    Args:
        trainer: The trainer.
        loader: The loader.
    """

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self.trainer, self.loader = trainer, loader

    def __iter__(self) -> Iterator[Any]:
        return (on_device(self.trainer, batch) for batch in self.loader)
