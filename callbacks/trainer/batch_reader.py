"""Batches as the training step takes them, for passes after the fit: what a batch does not tell, the user's step does."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_bayes.callbacks.trainer.loaders import random_state_kept
from lightning_bayes.callbacks.trainer.patches import Patches
from lightning_bayes.errors import DataError, UnsupportedTrainingError
from lightning_bayes.likelihood import Likelihood
from lightning_bayes.likelihood.batches import ReadBatch, read_batch
from lightning_bayes.likelihood.record import StepRecorder
from lightning_bayes.predictive.repeated import copied


@final
class BatchReader:
    """Reads batches as the training step of a module takes them: ``forward``'s arguments and output, targets and masks.

    Where the batch does not tell them, the user's ``training_step`` runs under a recorder. It logs nothing, and buffers,
    metrics, lists and counters of the module, and the global random state are the same afterwards.

    Args:
        module: The user's module.
        likelihood: What its training loss says about the outputs.
        forward: What to call in place of the module's ``forward`` where the batch tells everything; None calls the module.
    """

    def __init__(
        self, module: LightningModule, likelihood: Likelihood, forward: Callable[..., Any] | None = None
    ) -> None:
        self.module, self.likelihood = module, likelihood
        self._forward = forward or module

    @property
    def runs_step(self) -> bool:
        """Whether batches alone do not tell the inputs and the targets."""
        return self.likelihood.inputs is None or not self.likelihood.is_known

    def __call__(self, batch: Any, batch_idx: int = 0) -> ReadBatch:
        """Read one batch, on the module's device, with the graph of its outputs where gradients are enabled."""
        if not self.runs_step:
            return read_batch(self._forward, batch, self.likelihood)
        return self._of_step(copied(batch), batch_idx)

    def _of_step(self, batch: Any, batch_idx: int) -> ReadBatch:
        with recorded_step(self.module, batch, batch_idx) as (recorder, loss):
            return recorder.read(loss)


def recorded_likelihood(module: LightningModule, batch: Any) -> Likelihood:
    """What the training step says about the outputs on a batch that was not recorded in a fit."""
    with recorded_step(module, copied(batch)) as (recorder, loss):
        return recorder.likelihood(loss)


@contextmanager
def recorded_step(module: LightningModule, batch: Any, batch_idx: int = 0) -> Iterator[tuple[StepRecorder, Tensor]]:
    """Context with the record of an additional training step and its loss; see `unchanged`."""
    if not module.automatic_optimization:
        raise UnsupportedTrainingError(
            f"Only {type(module).__name__}.training_step tells the targets of a batch, but with manual optimization it "
            "also updates the weights. Take the loss of the batch's own targets, or state the likelihood with link=..."
        )
    recorder = StepRecorder(module)
    with unchanged(module), torch.inference_mode(False), torch.enable_grad():
        recorder.start(batch)
        try:
            loss = _loss_of(_called(module, batch, batch_idx))
            if loss is None:
                raise DataError(f"{type(module).__name__}.training_step returns no loss for a batch.")
            yield recorder, loss
        finally:
            recorder.stop()


@contextmanager
def unchanged(module: LightningModule) -> Iterator[None]:
    """Context for an additional step of a module: it logs nothing, and what it changes is as before afterwards."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    owners = [module, *(each for each in module.modules() if isinstance(each, Metric))]
    kept = [(owner, {name: _kept(value) for name, value in vars(owner).items()}) for owner in owners]
    patches = Patches()
    for name in ("log", "log_dict"):
        patches.set(module, name, _ignore)
    try:
        with random_state_kept(module):
            yield
    finally:
        patches.undo()
        for owner, values in kept:
            vars(owner).update(values)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.data.copy_(value)  # graphs that have saved the buffer keep their version of it


def _kept(value: Any) -> Any:
    """A value that survives changes in place: a copy of a tensor, a list, a dictionary of plain values, or itself."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    return copy.copy(value) if type(value) in {list, set} else value


def _ignore(*args: Any, **kwargs: Any) -> None:
    return


def _called(module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """What the training step returns for a batch, under the precision of the trainer."""
    arguments = [batch, batch_idx][: len(inspect.signature(module.training_step).parameters)]
    with module.trainer.precision_plugin.forward_context():
        return module.training_step(*arguments)


def _loss_of(returned: Any) -> Tensor | None:
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    return loss if isinstance(loss, Tensor) else None
