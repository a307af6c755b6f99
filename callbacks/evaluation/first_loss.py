"""Records the likelihood of a fit's first loss, and removes itself from the trainer."""

from __future__ import annotations

from typing import Any, Protocol, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_bayes.callbacks.trainer.neighbours import remove
from lightning_bayes.likelihood import Likelihood
from lightning_bayes.likelihood.record import StepRecorder


class KeepsLikelihood(Protocol):
    """A callback that keeps the likelihood of a fit."""

    loss_is_known: bool

    def take_loss(self, likelihood: Likelihood, module: LightningModule, batch: Any) -> None:
        """Keep what the first loss of a fit tells."""


@final
class FirstLoss(Callback):
    """Tells a callback the likelihood of the first loss, unless it knows it, such as in a resumed fit."""

    def __init__(self, owner: KeepsLikelihood) -> None:
        self._owner = owner
        self._recorder: StepRecorder | None = None
        self._batch: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the losses of the first batch of a fit, which may resume within an epoch."""
        self._stop()
        if self._owner.loss_is_known:
            remove(trainer, self)
            return
        self._recorder, self._batch = StepRecorder(pl_module), batch
        self._recorder.start(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Read the first loss."""
        if self._recorder is not None and not self._owner.loss_is_known:
            self._owner.take_loss(self._recorder.likelihood(loss), pl_module, self._batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop recording; a first batch without a loss leaves the next one to record."""
        self._stop()
        if self._owner.loss_is_known:
            remove(trainer, self)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the trainer, also without a loss."""
        self._stop()
        remove(trainer, self)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the trainer."""
        self.teardown(trainer, pl_module, "fit")

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder = self._batch = None
