"""SWAG with the user's optimizer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from lightning_bayes.callbacks.calibration import calibration_of
from lightning_bayes.callbacks.fit.num_data import infer_num_data
from lightning_bayes.callbacks.posthoc.base import PosthocCallback
from lightning_bayes.callbacks.posthoc.collection_times import CollectionTimes, epochs_of
from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.callbacks.trainer.forward_arguments import ForwardArguments
from lightning_bayes.callbacks.trainer.last_epoch import fit_kept, is_last_epoch
from lightning_bayes.callbacks.trainer.loaders import OnDevice, mean_over_processes, random_state_kept
from lightning_bayes.callbacks.trainer.masks import masked, multiplied
from lightning_bayes.callbacks.trainer.private_lightning import training_batches
from lightning_bayes.errors import HyperparameterError, UnsupportedTrainingError
from lightning_bayes.posthoc import SWAG
from lightning_bayes.predictive import Linearized, LinkArgument, evaluation_mode
from lightning_bayes.predictive.recalibration import running_statistics
from lightning_bayes.private_torch import ORIGINAL


class _OfBatches(nn.Module):
    """A module as a function of whole batches, of which `update_bn` would pass the first entry alone."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module, self._arguments = module, ForwardArguments(module)

    def forward(self, batch: Any) -> Any:
        return self._arguments.call(self.module, batch)


@final
class SWAGCallback(PosthocCallback):
    """Fits a low-rank Gaussian to the weights of the last epochs (Maddox et al. 2019, https://arxiv.org/abs/1902.02476).

    Training is unchanged. The callback collects the weights at the end of each of the last epochs; in a fit of one epoch, or
    one that ends by time, `max_rank` times within it. After the last epoch, and
    before the checkpoint is written, it sets the module to their mean and estimates BatchNorm statistics in one pass over
    the training data. `BatchNormRecalibration` estimates statistics for every sample, as in the paper.
    `DeepEnsembleCallback(members, samples=10)` of such checkpoints is Multi-SWAG (Wilson & Izmailov 2020,
    https://arxiv.org/abs/2002.08791).

    Args:
        start: Fraction of the fit after which collection starts, at least 0 and below 1. Collection starts in the
            second-last epoch at the latest.
        every: Epochs between two collections.
        max_rank: R, number of stored deviations, each as large as the network.
        lr: Constant learning rate of all parameter groups once collection starts, as in the paper; None keeps the user's
            schedule.
        eval_samples: S, weight samples in validation, test and prediction after the fit; 0 evaluates at the mean.
        linearized: The predictive; False samples networks, as in the paper. See `lightning_bayes.mc_predict`.
        link: How outputs become predictions. None: the module's attribute ``lightning_bayes_link``, else the link of the
            training loss, else raw outputs are averaged.
        seed: The seed of the samples.
        num_data: N, number of training examples; None counts them in the training loader.
        calibrate: None: a classifier with labelled validation data gets a temperature at the end of the fit. True also
            chooses the width of the posterior; False leaves predictions as trained. See `Calibration`.
        predict_once: Whether your ``predict_step`` runs once for each batch, with ``self(...)`` averaged inside; by default
            it runs under each sample.

    Raises:
        HyperparameterError: If an argument is out of range.
    """

    @checked
    def __init__(
        self,
        start: float = 0.75,
        every: int = 1,
        max_rank: int = 20,
        lr: float | None = None,
        eval_samples: int = 30,
        linearized: Linearized = False,
        link: LinkArgument | None = None,
        seed: int = 0,
        num_data: float | None = None,
        calibrate: bool | None = None,
        predict_once: bool = False,
    ) -> None:
        super().__init__(link, eval_samples, linearized, seed)
        self.predict_once = predict_once
        self._calibration = calibration_of(type(self).__name__, calibrate)
        if not 0 <= start < 1 or every < 1 or every != int(every) or not (lr is None or 0 < lr < math.inf):
            raise HyperparameterError(
                f"start={start!r} must be at least 0 and below 1, every={every!r} a whole number of at least 1, and "
                f"lr={lr!r} positive."
            )
        self.start, self.every, self.max_rank, self.lr, self.num_data = start, every, max_rank, lr, num_data
        self.moments = SWAG(max_rank)
        self._times = CollectionTimes(start, every, max_rank, 0)
        self._has_finished = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Require enough epochs, and an N.

        Raises:
            HyperparameterError: If fewer than two epochs would be collected.
        """
        self._has_tried = self._has_finished = False
        if self.num_data is None:
            infer_num_data(trainer)
        if not trainer.global_step:
            self.moments = SWAG(self.max_rank)
        self._times = times = CollectionTimes(self.start, self.every, self.max_rank, epochs_of(trainer))
        collections = sum(map(times.after_epoch, range(times.epochs)))
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._collect(pl_module)  # a second iterate, so that a trial run also makes the posterior
        elif times.epochs and collections < 2:
            raise HyperparameterError(
                f"SWAG needs the weights of at least 2 epochs, but start={self.start:g} and every={self.every} leave "
                f"{collections} of {times.epochs}. Train longer, or lower start or every."
            )
        elif not times.epochs and (1 - self.start) * trainer.estimated_stepping_batches < 2:
            raise HyperparameterError(
                f"SWAG needs the weights after at least 2 updates, but start={self.start:g} leaves fewer of "
                f"{trainer.estimated_stepping_batches}. Train longer, or lower start."
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the constant learning rate, and note layers that were unfrozen since the last collection."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.moments.count:
            params = self._collected_parameters(pl_module).items()
            self.moments.add_constant({name: p for name, p in params if not self.moments.is_collected(name)})
        if self.lr is not None and self._times.is_late(trainer):
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.lr

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect within an epoch; try the first batch of a fit whose end has to estimate BatchNorm statistics."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._times.after_update(trainer, self.moments.count):
            self._collect(pl_module)
        if self._has_tried:
            return
        self._has_tried = True
        if not running_statistics(pl_module):
            return
        with torch.no_grad(), evaluation_mode(pl_module), random_state_kept(pl_module):
            try:
                _OfBatches(pl_module)(self._first_batch)
            except UnsupportedTrainingError as error:
                name, reason = type(pl_module).__name__, error.__cause__ or error
                raise UnsupportedTrainingError(
                    f"SWAGCallback estimates BatchNorm statistics at the end by calling {name}.forward on batches, but it "
                    f"does not take the first one, a {type(batch).__name__}: {reason}. Let forward take the batch or "
                    "its first entries, or use VOGNCallback, which keeps the statistics of training."
                ) from error

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the weights, and fit the posterior after the last epoch."""
        if self._times.after_epoch(trainer.current_epoch):
            self._collect(pl_module)
        if is_last_epoch(trainer):
            self._end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the posterior if a later callback or the module has ended the fit after the last epoch."""
        if not self._has_finished:
            self._end(trainer, pl_module)

    def _end(self, trainer: Trainer, module: LightningModule) -> None:
        self._has_finished = True
        if self.moments.count >= 2:
            with fit_kept(type(self).__name__, "a posterior"):
                self._finish(trainer, module)
        else:
            rank_zero_warn(
                f"The fit ended after epoch {trainer.current_epoch}, when SWAGCallback had collected the weights "
                f"{self.moments.count} times; it needs 2, so there is no posterior. Lower start={self.start:g}, or "
                "train longer."
            )

    def _collect(self, module: LightningModule) -> None:
        self.moments.collect(self._collected_parameters(module))

    def _collected_parameters(self, module: LightningModule) -> dict[str, Tensor]:
        """The parameters that are trainable now, or were at an earlier collection; products of weights and masks."""
        is_collected = self.moments.is_collected
        held = module.state_dict(keep_vars=True)
        trained = {name for name, param in module.named_parameters() if param.requires_grad}
        return {
            name: value
            for name, value in multiplied(held).items()
            if name in trained or name + ORIGINAL in trained or is_collected(name)
        }

    @torch.no_grad()
    def _finish(self, trainer: Trainer, module: LightningModule) -> None:
        num_data = infer_num_data(trainer) if self.num_data is None else self.num_data
        held = module.state_dict(keep_vars=True)
        fitted = self.moments.posterior(num_data, dict.fromkeys(multiplied(held), math.nan))  # without a prior
        means = masked(fitted.mean, held)
        for name, mean in means.items():
            held[name if name in held else name + ORIGINAL].copy_(mean)
        if running_statistics(module):
            with random_state_kept(module):
                batches = OnDevice(trainer, training_batches(trainer), RunningStage.TRAINING)
                update_bn(([batch] for batch in batches), _OfBatches(module))
            reduce = mean_over_processes(trainer)
            for statistic in running_statistics(module).values():
                statistic.copy_(reduce(statistic))
        constants = {n: v.detach().clone() for n, v in multiplied(module.state_dict()).items() if n not in means}
        priors = {name: fitted.prior_precision[name] for name in means}
        self.keep(replace(fitted, mean=means, prior_precision=priors, constants=constants))
        rank_zero_info(f"SWAGCallback: set the module's weights to their mean over {self.moments.count} collections.")

    def missing_posterior(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn, and return None: SWAG needs the weights of several epochs, not of one checkpoint."""
        rank_zero_warn(
            "SWAGCallback evaluates at the module's current weights, which are not a mean of collected ones. Pass "
            "ckpt_path=... from a fit that ended with SWAGCallback."
        )

    def state_dict(self) -> dict[str, Any]:
        """The posterior, and the moments, which a resumed fit needs."""
        return {**super().state_dict(), "moments": self.moments.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the moments."""
        if "moments" in state_dict:
            self.moments.load_state_dict(state_dict["moments"])
