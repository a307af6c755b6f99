"""Access to training data outside of a fit, to measure the curvature or BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_bayes.callbacks.validation_set import on_device
from lightning_bayes.errors import UnsupportedTrainingError


def training_loader(trainer: Trainer, module: LightningModule, fitted_on: Any, callback: str) -> Any:
    """The training loader of the data module, else of the module, else of the last fit.

    Args:
        trainer: The trainer.
        module: The module.
        fitted_on: The loader of the last fit with this callback; None before a fit.
        callback: Name of the callback's class, for the message.

    Returns:
        The loader.

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
            f"{callback} needs training batches, but there was no fit with it, and there is no data module. Pass "
            "datamodule=..., define train_dataloader in the module, or add the callback to the fit."
        )
    return fitted_on


@final
class OnDevice:
    """A loader whose batches are converted and moved to the device, as for a training step.

    Args:
        trainer: The trainer.
        loader: The loader.
    """

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self.trainer, self.loader = trainer, loader

    def __iter__(self) -> Iterator[Any]:
        return (on_device(self.trainer, batch) for batch in self.loader)
