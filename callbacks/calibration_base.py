"""A width and a temperature of predictions: chosen at the end of a fit, stored, and applied outside of fits."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from itertools import islice
from typing import Any, Final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.calibration_outputs import Scalable, line_of
from lightning_bayes.callbacks.evaluation import EvaluationCallback
from lightning_bayes.callbacks.finished_samples import finished
from lightning_bayes.callbacks.last_epoch import fit_kept, is_last_epoch
from lightning_bayes.callbacks.loaders import mean_over_processes, random_state_kept
from lightning_bayes.callbacks.neighbours import callbacks_of
from lightning_bayes.callbacks.training_inputs import FIRST_BATCHES, TrainingInputs
from lightning_bayes.callbacks.validation_rows import KeptRows
from lightning_bayes.optim.readout import CALIBRATION_KEY
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.posteriors.scaled import InputMeans
from lightning_bayes.predictive import Calibration as Chosen
from lightning_bayes.predictive import (
    ClosedFormSamples,
    LinearizedSamples,
    Link,
    PosteriorSamples,
    Samples,
    evaluation_mode,
)
from lightning_bayes.predictive.batch_norm_inputs import centred_means, input_means

UPDATES_PER_BATCH: Final = 50  # of the fit, for each batch of its inputs that the end may run
_EXPANSIONS = (LinearizedSamples, ClosedFormSamples)


class CalibrationCallback(Callback, ABC):
    """Chooses at the end of a fit, on rows that its validations have shown."""

    state_key = CALIBRATION_KEY  # the same for any arguments, so that an evaluation can use other arguments

    def __init__(self) -> None:
        self.scale: float | None = None
        self.temperature, self.seconds = 1.0, 0.0
        self._is_linearized = False  # whether the scale was chosen for linearised predictions
        self._has_ended = True  # whether the end of the current fit has chosen
        self._epoch_end = -1  # update after which the callbacks of an epoch were called
        self._start_of_fit = math.inf
        self._kept, self._seen = KeptRows(), TrainingInputs(FIRST_BATCHES)
        self._input_means: InputMeans = {}  # of layers before BatchNorm
        self._centred = set[str]()  # the running means of BatchNorm layers in training mode
        self.needs_inputs = False  # whether another callback has to call `see`

    @abstractmethod
    def choose_in_fit(self, trainer: Trainer, module: LightningModule) -> None:
        """Choose at the end of a fit."""

    def state_dict(self) -> dict[str, Any]:
        """The width and the temperature, and whether they were chosen for linearised predictions; empty without them."""
        if self.scale is None:
            return {}
        chosen = {"scale": self.scale, "linearized": self._is_linearized, "temperature": self.temperature}
        return {**chosen, "input_means": self._input_means}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a checkpoint's width and temperature."""
        self.scale, self._is_linearized = state_dict["scale"], state_dict["linearized"]
        self.temperature, self._input_means = state_dict["temperature"], state_dict.get("input_means", {})

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Forget the numbers of other weights; `load_state_dict` follows if the checkpoint has its own."""
        self.forget()

    def forget(self) -> None:
        """Leave predictions as they are."""
        self.scale, self.temperature, self._input_means = None, 1.0, {}

    # -- during a fit -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the numbers of earlier weights, and start the clock."""
        self.forget()
        self._has_ended, self._start_of_fit = False, time.perf_counter()
        self._kept.start(0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the numbers of an epoch that was not the last, whatever it looked like."""
        self.forget()
        self._has_ended = False

    def see(self, module: LightningModule, batch: Any, index: int) -> None:
        """Keep one of the first batches of an epoch, if some BatchNorm layer subtracts its mean."""
        if not index:
            self._centred = centred_means(module)
        if self._centred:
            self._seen.add(batch, index)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the rows of an earlier validation of a fit."""
        if trainer.state.fn == "fit":
            self._kept.start(trainer.num_val_batches[0])

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep some rows before the step may change them."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not dataloader_idx:
            self._kept.add(batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose after the last epoch, before the checkpoint is written."""
        self._epoch_end = trainer.global_step
        if is_last_epoch(trainer):
            self._end(trainer, pl_module)
            if self.scale is not None and not trainer.barebones:
                chosen = {"val/posterior_scale": self.scale, "val/temperature": self.temperature}
                pl_module.log_dict(chosen, sync_dist=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Choose for the last checkpoint of a fit that `EarlyStopping` ends: it decides after the other callbacks."""
        is_over = trainer.state.fn == "fit" and trainer.should_stop and self._epoch_end == trainer.global_step
        if is_over and not self._has_ended:
            self._end(trainer, pl_module)
            if self.scale is not None:
                checkpoint.setdefault("callbacks", {})[self.state_key] = self.state_dict()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose after such a fit without a checkpoint."""
        if not self._has_ended and trainer.global_step:
            self._end(trainer, pl_module)
        self._kept.start(0)
        self._seen.batches = []

    @torch.no_grad()
    def _end(self, trainer: Trainer, module: LightningModule) -> None:
        self._has_ended = True
        with fit_kept("Calibration", "a width"), evaluation_mode(module), random_state_kept(module):
            self.choose_in_fit(trainer, module)

    def found_samples(self, trainer: Trainer, module: LightningModule, link: Link) -> Samples | None:
        """The samples at the end of a fit, as other callbacks finish them; None without any."""
        samples = evaluation_of(trainer).find_samples(trainer, module)
        return None if samples is None else finished(trainer, module, samples, link, but=self)[0]

    def with_inputs(self, trainer: Trainer, module: LightningModule, samples: Samples) -> Samples:
        """The samples at the end of a fit, `centred` by the inputs that it has seen."""
        if isinstance(samples, PosteriorSamples) and self._centred:
            self._input_means = self._found_means(trainer, module, samples.posterior)
        return self.centred(samples, module)

    def _found_means(self, trainer: Trainer, module: LightningModule, posterior: AbstractPosterior) -> InputMeans:
        """The mean inputs of layers before BatchNorm, averaged over processes; none if forward takes no batch."""
        try:
            most = max(1, trainer.global_step // UPDATES_PER_BATCH)
            means = input_means(module, islice(self._seen.runs(trainer, module), most), posterior.mean)
        except Exception as error:  # of the user's network, which a fit without calibration does not call here
            if isinstance(error, Warning):  # the user asked for an error
                raise
            return {}
        reduce = mean_over_processes(trainer)
        return {name: (weight, reduce(mean)) for name, (weight, mean) in means.items() if name in self._centred}

    def centred(self, samples: Samples, module: LightningModule) -> Samples:
        """Samples whose BatchNorm layers subtract the mean of each; see `ScaledPosterior`."""
        if not self._input_means or not isinstance(samples, PosteriorSamples):
            return samples
        posterior = ScaledPosterior(samples.posterior, 1.0, input_means=self._input_means)
        return PosteriorSamples(posterior.to(module.device), samples.count, samples.seed)

    def use(self, found: Chosen, samples: Samples, start: float, rows: int, tried: str) -> None:
        """Use the numbers that were found, and say so."""
        self.scale, self.temperature = found.scale, found.temperature
        self._is_linearized = isinstance(samples, _EXPANSIONS)
        self.seconds = time.perf_counter() - start
        spent = self.seconds / (start - self._start_of_fit)
        rank_zero_info(line_of(found, rows, tried, self.seconds, spent))

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def finished_samples(self, trainer: Trainer, module: LightningModule, samples: Samples, link: Link) -> Samples:
        """Samples of an evaluation outside of a fit, at the chosen width."""
        if self._is_linearized != isinstance(samples, _EXPANSIONS):  # chosen for the other predictive
            self.forget()
        if self.scale is None or not isinstance(samples, Scalable):
            return samples
        centred: Any = self.centred(samples, module)
        scaled: Samples = centred.scaled(self.scale)
        return scaled


def evaluation_of(trainer: Trainer) -> EvaluationCallback:
    """The callback whose predictions are calibrated."""
    return next(callback for callback in callbacks_of(trainer, EvaluationCallback) if callback.averages(trainer))
