"""Chooses the width of a trained posterior and a temperature on the validation set, and stores and applies them."""

from __future__ import annotations

import math
import time
from typing import Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.calibrating.batch_norm_means import BatchNormMeans
from lightning_bayes.callbacks.calibrating.calibration_choice import (
    FEWEST_ROWS,
    Choice,
    Chooser,
    is_trial,
    may_classify,
)
from lightning_bayes.callbacks.calibrating.held_out import Scalable, linearised, loaded_rows
from lightning_bayes.callbacks.calibrating.point_estimate import PointEstimate
from lightning_bayes.callbacks.evaluation.base import EvaluationCallback, evaluation_of
from lightning_bayes.callbacks.evaluation.finished_samples import FinishesSamples, finished
from lightning_bayes.callbacks.evaluation.validation_rows import KeptRows
from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.callbacks.trainer.last_epoch import fit_kept, is_last_epoch
from lightning_bayes.callbacks.trainer.loaders import ValidationSet, random_state_kept
from lightning_bayes.callbacks.trainer.neighbours import callbacks_of, insert_after
from lightning_bayes.errors import PosteriorError, UnsupportedTrainingError
from lightning_bayes.optim.readout import CALIBRATION_KEY
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive import ClosedFormSamples, LinearizedSamples, Samples, evaluation_mode
from lightning_bayes.predictive.recalibration import running_statistics

_EXPANSIONS = (LinearizedSamples, ClosedFormSamples)


def calibration_of(owner: str, calibrate: bool | None) -> Calibration | None:
    """The calibration of a callback's argument ``calibrate``; None chooses a temperature where the fit allows it."""
    if calibrate is None:
        return Calibration.by_default(owner)
    return Calibration().named(f"{owner}(calibrate=True)") if calibrate else None


def beside(trainer: Trainer, callback: Callback, calibration: Calibration | None) -> None:
    """Put the calibration of a callback behind all that finish samples; its hooks run before the checkpoint's."""
    others = [other for other in callbacks_of(trainer, Calibration) if other is not calibration]
    if calibration is None or (others and not calibration.is_required):
        return
    if others and others[0].is_required:
        raise UnsupportedTrainingError(
            f"{calibration.name} and {others[0].name} both choose the width of the posterior. Remove one of them."
        )
    callbacks = callbacks_of(trainer, Callback)
    if calibration not in callbacks and callback in callbacks:
        finishing = [other for other in callbacks if isinstance(other, FinishesSamples)]
        insert_after(trainer, calibration, callback, *finishing)


@final
class Calibration(Callback):
    """Chooses a temperature and the width of the posterior on the validation set, at the end of a fit.

    Callbacks such as `VOGNCallback` and `DeepEnsembleCallback` add one by default, which chooses a temperature where the fit
    has labelled validation data; ``calibrate=True`` chooses the width too. Without another callback, the network gets a
    temperature.

    T divides the logits of every sample, and Σ becomes c² Σ. Both minimise the validation NLL and are shrunk towards 1, so
    that few examples change little; see `lightning_bayes.calibrate`. An ensemble or dropout has no width, and regressions
    have no temperature.

    Both numbers are logged as ``val/posterior_scale`` and ``val/temperature`` and saved in the checkpoint. Tests,
    validations and predictions outside of a fit use them, for any module, and `load_posterior` returns them. For a
    checkpoint without them, they are chosen first.

    Batches are read as the training step reads them: any inputs, ignored, missing and selected targets. Where a batch alone
    does not tell its targets, the training step itself is run: it logs nothing, and the module is as before afterwards. The
    likelihood is that of the evaluation; a regression without known noise takes that of the module's
    ``lightning_bayes_likelihood``, a `lightning_bayes.likelihood.Gaussian`, else fits σ at each width.

    It calls the network at most .15 times as often as the fit has batches, but on 200 validation examples at least. If that
    is not enough for widths, it chooses a temperature only.

    Args:
        linearized: Whether predictions are linearised, see `LinearizedSamples`; None follows the callback with the
            posterior.
        refit: Whether to choose again before each evaluation even if the checkpoint has a width, such as for another number
            of samples.
        width: Whether to choose the width too.

    Attributes:
        scale: c of the current posterior; None if it is not chosen yet.
        temperature: The temperature.
        seconds: The time that the last choice took.
    """

    state_key = CALIBRATION_KEY  # the same for any arguments, so that an evaluation can use other arguments

    @checked
    def __init__(self, linearized: bool | None = None, refit: bool = False, width: bool = True) -> None:
        super().__init__()
        self.linearized, self.refit, self.width = linearized, refit, width
        self.name = "Calibration"  # in messages
        self.is_required = self.chooses = True
        self.scale: float | None = None
        self.temperature, self.seconds = 1.0, 0.0
        self._is_linearized = False  # whether the scale was chosen for linearised predictions
        self._has_ended = True  # whether the end of the current fit has chosen
        self._epoch_end = -1  # update after which the callbacks of an epoch were called
        self._start_of_fit = math.inf
        self._kept, self._inputs = KeptRows(), BatchNormMeans()
        self._validation = ValidationSet(self.name, "width and temperature")

    @classmethod
    def by_default(cls, owner: str, chooses: bool = True) -> Calibration:
        """One that a callback adds: it refuses nothing, and chooses a temperature or only compares with the network."""
        found = cls(width=False)
        found.is_required, found.chooses = False, chooses
        return found.named(owner)

    def named(self, owner: str) -> Calibration:
        """The same, with the name of its owner in messages."""
        self.name = self._validation.callback = owner
        return self

    def scaled(self, posterior: AbstractPosterior) -> ScaledPosterior:
        """A posterior at the chosen width and temperature, for example for `save_posterior`.

        Args:
            posterior: The posterior of the last fit or of the checkpoint.

        Returns:
            The posterior; `mc_predict` uses it with the predictive that the width was chosen for.

        Raises:
            PosteriorError: If no width was chosen.
        """
        if self.scale is None:
            raise PosteriorError("Calibration has not chosen a width. Fit or test first.")
        return ScaledPosterior(posterior, self.scale, self._is_linearized, self.temperature, self._inputs.means)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The width and the temperature, and whether they were chosen for linearised predictions; empty without them."""
        if self.scale is None:
            return {}
        chosen = {"scale": self.scale, "linearized": self._is_linearized, "temperature": self.temperature}
        return {**chosen, "input_means": self._inputs.means}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a checkpoint's width and temperature."""
        self.scale, self._is_linearized = state_dict["scale"], state_dict["linearized"]
        self.temperature, self._inputs.means = state_dict["temperature"], state_dict.get("input_means", {})

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Forget the numbers of other weights; `load_state_dict` follows if the checkpoint has its own."""
        has_none = CALIBRATION_KEY not in checkpoint.get("callbacks", {})
        is_lost = has_none and not self.is_required and not evaluation_of(trainer).stores_calibration
        if is_lost and self.scale is not None and trainer.state.fn != "fit":
            rank_zero_info(
                f"{self.name}: the temperature {self.temperature:.3g} belongs to the last weights of the fit. This "
                "checkpoint has none, so its predictions are as trained. calibrate=True chooses one for each checkpoint."
            )
        self.forget()

    def forget(self) -> None:
        """Leave predictions as they are."""
        self.scale, self.temperature, self._inputs.means = None, 1.0, {}

    # -- during a fit -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add an evaluation to a trainer without one, so that a network alone gets a temperature."""
        if not callbacks_of(trainer, EvaluationCallback):
            insert_after(trainer, PointEstimate(), self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the numbers of earlier weights, start the clock, and require a validation set if asked to choose."""
        self.forget()
        self._has_ended, self._start_of_fit = False, time.perf_counter()
        self._kept.start(0)
        if self.is_required:
            self._validation.require(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the numbers of an epoch that was not the last, whatever it looked like."""
        self.forget()
        self._has_ended = False
        if self.chooses and running_statistics(
            pl_module
        ):  # a hook of the class would cost every batch of every network
            self.on_train_batch_start = self._see  # type: ignore[method-assign]

    def _see(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the inputs of the first batches of an epoch."""
        self._inputs.see(pl_module, batch, batch_idx)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaders, and forget the rows of an earlier validation of a fit."""
        self._validation.keep(trainer)
        if trainer.state.fn == "fit":
            self._kept.start(trainer.num_val_batches[0])

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep some rows before the step may change them."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not dataloader_idx:
            self._kept.add(batch, batch_idx)
            if self.is_required and self._kept.other is not None:
                raise UnsupportedTrainingError(
                    f"{self.name} chooses on rows of validation batches, but those of a {self._kept.other} are not known. "
                    "Yield pairs (inputs, targets), or tensors that share their first dimension; or choose the width and "
                    "temperature yourself with lightning_bayes.calibrate."
                )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose after the last epoch, before the checkpoint is written."""
        self._epoch_end = trainer.global_step
        if is_last_epoch(trainer):
            self.end(trainer, pl_module)
            if self.scale is not None and not trainer.barebones:
                chosen = {"val/posterior_scale": self.scale, "val/temperature": self.temperature}
                pl_module.log_dict(chosen, sync_dist=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Choose for the last checkpoint of a fit that `EarlyStopping` ends: it decides after the other callbacks."""
        is_over = trainer.state.fn == "fit" and trainer.should_stop and self._epoch_end == trainer.global_step
        if is_over and not self._has_ended:
            self.end(trainer, pl_module)
            if self.scale is not None:
                checkpoint.setdefault("callbacks", {})[self.state_key] = self.state_dict()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose after such a fit without a checkpoint."""
        if not self._has_ended and trainer.global_step:
            self.end(trainer, pl_module)
        self._inputs.clear()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the rows of the fit."""
        self._kept.start(0)

    @torch.no_grad()
    def end(self, trainer: Trainer, module: LightningModule) -> None:
        """Choose at the end of a fit, and compare the samples with the network alone."""
        self._has_ended = True
        result = "a width" if self.is_required else "a temperature"
        with fit_kept(self.name, result), evaluation_mode(module), random_state_kept(module):
            self._end(trainer, module)

    def _end(self, trainer: Trainer, module: LightningModule) -> None:
        start, callback = time.perf_counter(), evaluation_of(trainer)
        is_alone = is_trial(trainer) or not (self.is_required or may_classify(callback.likelihood_of(module)))
        samples = None if is_alone else callback.find_samples(trainer, module)
        if samples is None:
            return
        samples = linearised(finished(trainer, module, samples, but=self)[0], self.linearized)
        found = self._chooser(trainer, module).at_end(samples, self._kept, self._inputs)
        if isinstance(found, str) and self.chooses:
            hint = "" if self.is_required else " calibrate=False skips this."
            rank_zero_info(f"{self.name} chooses no temperature on the validation set: {found}.{hint}")
        if isinstance(found, Choice):
            self._use(found, start)
            callback.validated = found.comparison or callback.validated

    def _chooser(self, trainer: Trainer, module: LightningModule) -> Chooser:
        return Chooser(trainer, module, evaluation_of(trainer), self.width, self.chooses, self.is_required)

    def _use(self, found: Choice, start: float) -> None:
        """Use the numbers that were found, and say so."""
        if found.chosen is None:
            return
        self.scale, self.temperature = found.chosen.scale, found.chosen.temperature
        self._is_linearized = isinstance(found.samples, _EXPANSIONS)
        self.seconds = time.perf_counter() - start
        rank_zero_info(f"{self.name}: {found.line(self.seconds, start - self._start_of_fit, self.width)}")

    def finished_samples(self, trainer: Trainer, module: LightningModule, samples: Samples) -> Samples:
        """Samples of an evaluation outside of a fit at the chosen width, which is chosen first if this was asked for."""
        followed = linearised(samples, self.linearized)
        if self._is_linearized != isinstance(followed, _EXPANSIONS):  # chosen for the other predictive
            self.forget()
        if self.is_required and (self.scale is None or self.refit):
            self._choose(trainer, module, followed)
        if self.scale is None or not isinstance(followed, Scalable):
            return followed
        centred: Any = self._inputs.centred(followed, module)
        scaled: Samples = centred.scaled(self.scale)
        return scaled

    def _choose(self, trainer: Trainer, module: LightningModule, samples: Samples) -> None:
        """Choose before an evaluation of a checkpoint."""
        start = time.perf_counter()
        with random_state_kept(module), torch.no_grad():
            batches = loaded_rows(trainer, self._validation, 5 * FEWEST_ROWS)
            found = self._chooser(trainer, module).before_evaluation(self._inputs.centred(samples, module), batches)
        self._use(found, start)
