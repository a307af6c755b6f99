"""Training and validation sets for callbacks that need them outside of a fit as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, Final, final

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_bayes.callbacks.trainer.private_lightning import training_batches
from lightning_bayes.errors import UnsupportedTrainingError

_END: Final = object()


@final
class ValidationSet:
    """Finds the validation loader, also in a test, which has none."""

    def __init__(self, callback: str, number: str) -> None:
        self.callback, self.number = callback, number
        self._loaders: Any = None  # loaders of the last fit or validation; the trainer forgets them in a test

    def require(self, trainer: Trainer) -> None:
        """Keep the loaders of a fit's validation set; raises `UnsupportedTrainingError` if there is none."""
        if not sum(trainer.num_val_batches):
            raise self._missing("this fit has none")
        self.keep(trainer)

    def keep(self, trainer: Trainer) -> None:
        """Keep the loaders of the current validation."""
        self._loaders = trainer.val_dataloaders

    def find(self, trainer: Trainer) -> Any:
        """The first loader of the data module outside of a fit, else that was kept, else of the module; None without one."""
        datamodule, module = getattr(trainer, "datamodule", None), trainer.lightning_module
        if trainer.state.fn == "fit" or (datamodule is None and self._loaders is not None):
            return _first(self._loaders)
        with in_stage(trainer, RunningStage.VALIDATING):
            if datamodule is None:
                return _first(module.val_dataloader()) if is_overridden("val_dataloader", module) else None
            if not is_overridden("val_dataloader", datamodule, LightningDataModule):
                return None
            datamodule.setup("validate")
            return _first(datamodule.val_dataloader())

    def loader(self, trainer: Trainer) -> Any:
        """The result of `find`; raises `UnsupportedTrainingError` instead of returning None."""
        loader = self.find(trainer)
        if loader is None:
            data = getattr(trainer, "datamodule", None)
            nowhere = "this callback has seen none"
            raise self._missing(nowhere if data is None else f"{type(data).__name__}.val_dataloader() returns none")
        return loader

    def _missing(self, reason: str) -> UnsupportedTrainingError:
        return UnsupportedTrainingError(
            f"{self.callback} fits its {self.number} on a validation set, but {reason}. Hold out some training examples, "
            "for example with val_size of the zoo's data modules; the test set is never used."
        )


def _first(loaders: Any) -> Any:
    return next(iter(_combined(loaders).flattened), None)


def _combined(loaders: Any) -> CombinedLoader:
    return loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")


def training_loader(trainer: Trainer, module: LightningModule, fitted_on: Any, callback: str) -> Any:
    """The loaders of the current fit, else of the data module, else of the module, else of the last fit, `fitted_on`."""
    if trainer.state.fn == "fit":
        return training_batches(trainer)
    datamodule = getattr(trainer, "datamodule", None)
    with in_stage(trainer, RunningStage.TRAINING):
        if datamodule is not None:
            datamodule.setup("fit")
            return _combined(datamodule.train_dataloader())
        if is_overridden("train_dataloader", module):
            return _combined(module.train_dataloader())
    if fitted_on is None:
        raise UnsupportedTrainingError(
            f"{callback} needs training batches, but there was no fit with it, and there is no data module. Pass "
            "datamodule=..., define train_dataloader in the module, or add the callback to the fit."
        )
    return fitted_on


def sum_over_processes(trainer: Trainer, module: LightningModule) -> Callable[[Tensor], Tensor]:
    """A function that sums a tensor over processes."""

    def reduce(total: Tensor) -> Tensor:
        if trainer.world_size == 1:
            return total
        summed: Tensor = trainer.strategy.reduce(total.to(module.device), reduce_op="sum")
        return summed

    return reduce


def mean_over_processes(trainer: Trainer) -> Callable[[Tensor], Tensor]:
    """A function that averages a statistic over processes that each saw other batches; integers stay as they are."""

    def reduce(statistic: Tensor) -> Tensor:
        if trainer.world_size == 1 or not statistic.is_floating_point():
            return statistic
        reduced: Tensor = trainer.strategy.reduce(statistic, reduce_op="mean")
        return reduced

    return reduce


def random_state_kept(module: LightningModule) -> AbstractContextManager[None]:
    """Context that restores the global random state afterwards: loaders draw from it."""
    return torch.random.fork_rng([module.device] if module.device.type == "cuda" else [])


@contextmanager
def in_stage(trainer: Trainer, stage: RunningStage) -> Iterator[None]:
    """Context in which the trainer says that it trains or validates, as hooks and data sets of the user may ask."""
    state = trainer.state
    before = state.fn, state.stage
    if state.fn != TrainerFn.FITTING:  # which validates, too
        state.fn = TrainerFn.FITTING if stage == RunningStage.TRAINING else TrainerFn.VALIDATING
    state.stage = stage
    try:
        yield
    finally:
        state.fn, state.stage = before


@final
class OnDevice:
    """A loader whose batches are loaded and moved as in a stage of the trainer: hooks of the user, limits of the fit."""

    def __init__(self, trainer: Trainer, loader: Any, stage: RunningStage) -> None:
        self.trainer, self.loader, self.stage = trainer, loader, stage

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loaded():
            with in_stage(self.trainer, self.stage):  # not around the yield, where the consumer's code runs
                moved = self._moved(batch)
            yield moved

    def loaded(self) -> Iterator[Any]:
        """The batches as the loader yields them."""
        with in_stage(self.trainer, self.stage):
            batches = islice(self.loader, self._limit())
        while True:
            with in_stage(self.trainer, self.stage):
                batch: Any = next(batches, _END)
            if batch is _END:
                return
            yield batch[0] if isinstance(self.loader, CombinedLoader) else batch

    def _limit(self) -> int | None:
        """The number of batches that an epoch of the current fit reads; None if there is no limit."""
        if self.trainer.state.fn != TrainerFn.FITTING:
            return None
        is_training = self.stage == RunningStage.TRAINING
        limit = self.trainer.num_training_batches if is_training else next(iter(self.trainer.num_val_batches), math.inf)
        return int(limit) if math.isfinite(limit) else None

    def _moved(self, batch: Any) -> Any:
        trainer, data = self.trainer, getattr(self.trainer, "datamodule", None)
        is_of_data = data is not None and is_overridden("on_before_batch_transfer", data, LightningDataModule)
        owner: Any = data if is_of_data else trainer.lightning_module
        converted = trainer.precision_plugin.convert_input(batch)
        return trainer.strategy.batch_to_device(owner.on_before_batch_transfer(converted, 0))
