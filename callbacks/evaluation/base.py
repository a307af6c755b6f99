"""Evaluation under samples: averages validation, test and prediction, with the link of the module or of its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.evaluation.finished_samples import finished
from lightning_bayes.callbacks.evaluation.first_loss import FirstLoss
from lightning_bayes.callbacks.evaluation.loop import SampledLoop
from lightning_bayes.callbacks.evaluation.mean_comparison import Comparison
from lightning_bayes.callbacks.evaluation.predict_step import replace_predict_step
from lightning_bayes.callbacks.evaluation.sampled_forward import SampledForward
from lightning_bayes.callbacks.evaluation.sampled_network import SampledNetwork
from lightning_bayes.callbacks.evaluation.spread import spread
from lightning_bayes.callbacks.evaluation.validation_rows import rows_of
from lightning_bayes.callbacks.recalibration import recalibrated
from lightning_bayes.callbacks.trainer.batch_reader import BatchReader
from lightning_bayes.callbacks.trainer.checks import check_trainer
from lightning_bayes.callbacks.trainer.last_epoch import may_be_last_validation
from lightning_bayes.callbacks.trainer.neighbours import callbacks_of, insert_after, is_missing
from lightning_bayes.callbacks.trainer.patches import Patches
from lightning_bayes.callbacks.trainer.stated_likelihood import stated_by
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.likelihood import Likelihood, find_kind
from lightning_bayes.likelihood.value import stored_likelihood
from lightning_bayes.predictive import LinkArgument, Samples
from lightning_bayes.predictive.averages import OutputAverage
from lightning_bayes.predictive.known_outputs import UNKNOWN


class EvaluationCallback(Callback, ABC):
    """Averages a module's predictions over samples in validation, test and prediction."""

    opt_out_hint = "set eval_samples=0"
    stores_calibration = False  # whether a calibration is saved elsewhere than in the checkpoint
    interval: float = 0.9  # probability of predicted intervals
    predict_once: bool = False  # whether the user's predict_step runs once for a batch, with self(...) averaged in it

    def __init__(self, link: LinkArgument | None) -> None:
        self._stated = None if link is None else find_kind(link)
        self.loss_likelihood = Likelihood()  # of the first training step, completed by what is stated
        self.batch_rows = 0  # of the first batch, a pair (inputs, targets)
        self.loss_is_known = False  # whether the first loss of the fit has told
        self._has_told_raw = False
        self._loop: SampledLoop | None = None
        self.validated: Comparison | None = None  # with the mean, in the last validation of a fit
        self._patches = Patches()  # of a run; `undo` reverts them

    @abstractmethod
    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> Samples | None:
        """The samples to average over; None to leave the module alone."""

    def averages(self, trainer: Trainer) -> bool:
        """Whether this callback averages predictions itself, and does not only change the samples of another."""
        return True

    def compares_validations(self, module: LightningModule) -> bool:
        """Whether each validation of a fit is compared with the mean, and not only the last."""
        return False

    def likelihood_of(self, module: LightningModule) -> Likelihood:
        """The likelihood of the training loss, completed by the argument ``link``, or by the module's attribute."""
        return self.loss_likelihood.completed(self._stated or stated_by(module))

    def reader(self, module: LightningModule) -> BatchReader:
        """Reads labelled batches as the training step takes them."""
        is_stated = (self._stated or stated_by(module)) is not None
        return BatchReader(module, self.likelihood_of(module), bool(self.loss_likelihood.outputs), is_stated)

    def _tell_raw(self, likelihood: Likelihood) -> None:
        """Where nothing is known, raw outputs are averaged; a line says how to state what they are."""
        if not likelihood.outputs and not self._has_told_raw:
            self._has_told_raw = True
            rank_zero_info(UNKNOWN.format(f"{type(self).__name__}: the training loss"))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse trainers of the package pytorch_lightning, and undo what an earlier run may have left behind."""
        check_trainer(trainer, stage, type(self).__name__)
        self.undo()
        self.loss_is_known = False
        if stage == "fit" and not is_missing(trainer, self):
            insert_after(trainer, FirstLoss(self), self)
        self.validated = self.validated if stage != "fit" else None

    def loss_state(self) -> dict[str, Any]:
        """What the training loss told, for a checkpoint."""
        return {"likelihood": self.loss_likelihood.state(), "rows": self.batch_rows}

    def load_loss_state(self, state: Mapping[str, Any]) -> None:
        """Restore `loss_state`; checkpoints of earlier versions hold less."""
        self.loss_likelihood, self.batch_rows = stored_likelihood(state), state.get("rows", 0)

    def undo(self) -> None:
        """Undo all changes of the trainer and the module."""
        self._stop(warn=False)
        self._patches.undo()

    def take_loss(self, likelihood: Likelihood, module: LightningModule, batch: Any) -> None:
        """Keep what the first loss of a fit tells."""
        self.loss_is_known, self.batch_rows, self.loss_likelihood = True, rows_of(batch), likelihood
        self.loss_likelihood = self.likelihood_of(module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what averaging over samples changes on the validation set, once a calibration has chosen."""
        if self.validated is not None and self.averages(trainer):
            rank_zero_info(f"{type(self).__name__}: {self.validated.summary()}.")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start averaging."""
        samples = None if trainer.sanity_checking else self.find_samples(trainer, pl_module)
        if samples is not None:
            require_single_evaluation(trainer)
            self._loop = self._loop_of(trainer, pl_module, samples)
            self._loop.forward.start()
            if trainer.predicting:
                replace_predict_step(self._loop.forward, self.predict_once)

    on_test_start = on_predict_start = on_validation_start

    def _loop_of(self, trainer: Trainer, module: LightningModule, samples: Samples) -> SampledLoop:
        likelihood = self.likelihood_of(module)
        self._tell_raw(likelihood)
        is_fit, temperature = trainer.state.fn == "fit", 1.0
        if not is_fit:
            samples, temperature = finished(trainer, module, samples)
            samples = recalibrated(trainer, module, samples)
        average = OutputAverage(likelihood, temperature, self.interval)
        network = SampledNetwork(module, spread(trainer, samples), average, is_quiet=is_fit)
        forward = SampledForward(network, self.opt_out_hint, lenient=is_fit)
        in_fit = is_fit and (may_be_last_validation(trainer) or self.compares_validations(module))
        return SampledLoop(trainer, forward, type(self).__name__, compares=trainer.testing or in_fit)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Score what the step has predicted."""
        if self._loop is not None:
            self._loop.end_step(outputs, batch, batch_idx, dataloader_idx)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the comparison of the last validation of a fit."""
        self.validated = None if self._loop is None else self._loop.compared()

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the scores of the test."""
        if self._loop is not None:
            self._loop.end_test()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop averaging."""
        self._stop()

    on_validation_end = on_test_end = on_predict_end

    def _stop(self, warn: bool = True) -> None:
        """Restore the module's forward, and warn by default if nothing was averaged."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.forward.stop(warn)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo everything at the end of a run."""
        self.undo()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo everything: after an exception, Lightning does not call the `teardown` of callbacks."""
        self.undo()


def evaluation_of(trainer: Trainer) -> EvaluationCallback:
    """The callback that averages predictions."""
    return next(callback for callback in callbacks_of(trainer, EvaluationCallback) if callback.averages(trainer))


def require_single_evaluation(trainer: Trainer) -> None:
    """Require one callback that evaluates under samples: with two, one would average the other's averages."""
    averaging = [callback for callback in callbacks_of(trainer, EvaluationCallback) if callback.averages(trainer)]
    names = [type(callback).__name__ for callback in averaging]
    if len(names) > 1:
        raise UnsupportedTrainingError(f"{' and '.join(names)} each average predictions. Keep one of them.")
