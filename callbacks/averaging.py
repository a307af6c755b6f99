"""What every callback does that averages predictions over samples of a module: when, and with which link."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_bayes.callbacks.evaluation import SampledEvaluation
from lightning_bayes.callbacks.loss_link import link_of_loss
from lightning_bayes.callbacks.recalibration import recalibrated
from lightning_bayes.callbacks.spread import spread
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import Link, Samples, check_link


class AveragingCallback(Callback, ABC):
    """Averages validation, test and prediction over samples.

    Args:
        link: How outputs become predictions; None asks the module, then the training loss.
        seed: Seed of the samples.
    """

    way_out = "set eval_samples=0"  # of averaging, for messages

    def __init__(self, link: Link | None, seed: int) -> None:
        if link is not None:
            check_link(link)
        self.link, self.seed = link, seed
        self.loss_link: Link | None = None  # what the training loss says
        self._asked_loss = False
        self._evaluation: SampledEvaluation | None = None

    @abstractmethod
    def _samples_now(self, trainer: Trainer, pl_module: LightningModule) -> Samples | None:
        """What to average over; None to leave the module alone."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Read from the first loss of a fit how outputs become predictions.

        Args:
            trainer: The trainer.
            pl_module: The module.
            loss: The loss.
        """
        if not self._asked_loss:
            self._asked_loss, self.loss_link = True, link_of_loss(loss)

    def _link_of(self, module: LightningModule) -> Link | None:
        found: Link | None = self.link or getattr(module, "link", None) or self.loss_link
        return found

    def _start_evaluation(self, trainer: Trainer, pl_module: LightningModule, predict: bool = False) -> None:
        if trainer.sanity_checking:
            return
        samples = self._samples_now(trainer, pl_module)
        if samples is None:
            return
        check_alone(trainer)
        link = self._link_of(pl_module) or "softmax"
        samples = spread(trainer, recalibrated(trainer, pl_module, samples))
        lenient = trainer.state.fn == "fit"
        self._evaluation = SampledEvaluation(pl_module, samples, link, way_out=self.way_out, lenient=lenient)
        self._evaluation.start(predict)

    def stop_evaluation(self, warn: bool = True) -> None:
        """Give the module its own forward back.

        Args:
            warn: Whether to warn if nothing was averaged.
        """
        if self._evaluation is not None:
            self._evaluation.stop(warn)
            self._evaluation = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average over samples from here."""
        self._start_evaluation(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to the module's own forward."""
        self.stop_evaluation()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average over samples from here."""
        self._start_evaluation(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to the module's own forward."""
        self.stop_evaluation()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average over samples from here."""
        self._start_evaluation(trainer, pl_module, predict=True)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to the module's own forward."""
        self.stop_evaluation()

    def _restore(self) -> None:
        """Undo whatever was done to the trainer and the module."""
        self.stop_evaluation(warn=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo what was done to the module.

        Args:
            trainer: The trainer.
            pl_module: The module.
            stage: The stage that ends.
        """
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo what was done to the module; Lightning calls no teardown after an exception.

        Args:
            trainer: The trainer.
            pl_module: The module.
            exception: What happened.
        """
        self._restore()


def check_alone(trainer: Trainer) -> None:
    """Require one averaging callback: two would average each other's averages.

    Args:
        trainer: The trainer.

    Raises:
        UnsupportedTrainingError: If there are several.
    """
    found = [type(c).__name__ for c in trainer.callbacks if isinstance(c, AveragingCallback)]  # type: ignore[attr-defined]
    if len(found) > 1:
        raise UnsupportedTrainingError(f"{' and '.join(found)} each average predictions. Keep one of them.")
