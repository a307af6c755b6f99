"""The validation set that a callback fits a number on, during a fit and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_bayes.callbacks.step_outputs import StepOutputs, step_outputs
from lightning_bayes.errors import UnsupportedTrainingError


@final
class ValidationSet:
    """Finds the validation loader, which a test does not have.

    Args:
        callback: Name of the callback's class, for messages.
        number: The quantity that the callback fits, for messages.
    """

    def __init__(self, callback: str, number: str) -> None:
        self.callback, self.number = callback, number
        self._seen: Any = None  # the loaders of a fit or validation; a test makes the trainer forget them

    def require(self, trainer: Trainer) -> None:
        """Require that a fit has a validation set, and keep it.

        Args:
            trainer: The trainer; without a validation set this is an `UnsupportedTrainingError`.
        """
        if not sum(trainer.num_val_batches):
            raise self._missing("this fit has none")
        self.keep(trainer)

    def keep(self, trainer: Trainer) -> None:
        """Keep the loaders of a validation."""
        self._seen = trainer.val_dataloaders

    def find(self, trainer: Trainer | None) -> Any:
        """The first validation loader, if there is one.

        Args:
            trainer: The trainer; None in a fit.

        Returns:
            That of the data module, else the last one kept; None if there is none.
        """
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is None:
            return _first(self._seen)
        if not is_overridden("val_dataloader", datamodule, LightningDataModule):
            return None
        datamodule.setup("validate")
        return _first(datamodule.val_dataloader())

    def loader(self, trainer: Trainer | None) -> Any:
        """The first validation loader; if there is none, this is an `UnsupportedTrainingError`.

        Args:
            trainer: The trainer; None in a fit.

        Returns:
            As `find`.
        """
        found = self.find(trainer)
        if found is not None:
            return found
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            raise self._missing(f"{type(datamodule).__name__}.val_dataloader() gives none")
        raise self._missing("this fit has none" if trainer is None else "this callback has seen none")

    def _missing(self, why: str) -> UnsupportedTrainingError:
        return UnsupportedTrainingError(
            f"{self.callback} fits its {self.number} on a validation set, but {why}. Set some training examples aside, such "
            "as with val_size of the zoo's data modules; the test set is never used."
        )


def _first(loaders: Any) -> Any:
    return next(iter(loaders), None) if isinstance(loaders, (list, tuple)) else loaders


def added_up(trainer: Trainer, module: LightningModule) -> Callable[[Tensor], Tensor]:
    """A function that adds a tensor up over processes.

    Returns:
        The function.
    """

    def reduce(total: Tensor) -> Tensor:
        if trainer.world_size == 1:
            return total
        summed: Tensor = trainer.strategy.reduce(total.to(module.device), reduce_op="sum")
        return summed

    return reduce


def on_device(trainer: Trainer, batch: Any) -> Any:
    """A batch as a step would get it.

    Returns:
        The batch, in the trainer's precision and on its device.
    """
    return trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))


def evaluated(trainer: Trainer, module: Any, batches: Iterable[Any]) -> Iterator[StepOutputs]:
    """Evaluate the validation set inside another evaluation, in its mode and under its samples.

    Args:
        trainer: The trainer.
        module: A `ScaledModule`.
        batches: Inputs and targets.

    Yields:
        Logits and targets of each batch.
    """
    for batch in batches:
        inputs, targets = on_device(trainer, batch)
        with trainer.precision_plugin.forward_context():
            outputs = module.sampled_forward(inputs)
        yield step_outputs(module, "sampled_forward", {"outputs": outputs, "targets": targets})
