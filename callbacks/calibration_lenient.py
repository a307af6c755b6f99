"""The calibration that a callback adds beside itself.

By default, it refuses nothing: it chooses a temperature, where the fit tells the task and was long enough.
"""

from __future__ import annotations

import time
from typing import Any, Final, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bayes.callbacks.calibration import Calibration
from lightning_bayes.callbacks.calibration_base import CalibrationCallback, evaluation_of
from lightning_bayes.callbacks.calibration_budget import agreed, budget_of_fit
from lightning_bayes.callbacks.calibration_outputs import ValidationOutputs, kept_rows
from lightning_bayes.callbacks.evaluation import EvaluationCallback
from lightning_bayes.callbacks.finished_samples import FinishesSamples
from lightning_bayes.callbacks.loaders import ValidationSet, sum_over_processes
from lightning_bayes.callbacks.neighbours import callbacks_of, insert_after
from lightning_bayes.callbacks.recalibration import recalibrated_examples
from lightning_bayes.callbacks.rejection import RejectorCallback
from lightning_bayes.callbacks.step_outputs import StepOutputs
from lightning_bayes.callbacks.validation_rows import rows_of
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.readout import CALIBRATION_KEY
from lightning_bayes.predictive import Link, PosteriorSamples, Samples, choose_calibration, combine
from lightning_bayes.predictive.calibration import CLASS_LINKS
from lightning_bayes.predictive.links import CLASS_DIMS
from lightning_bayes.predictive.recalibration import running_statistics

_ERRORS: Final = 2.0  # standard errors by which the NLL has to fall: twice those of a calibration that was asked for
_FEWEST_ROWS: Final = 750  # of a larger set; 256 overshot, and cost .008 nats in a short fit
_FEWEST_SAMPLES: Final = 3  # as in validations, for short fits: fewer samples ask for a slightly higher temperature
_FEWEST_MISTAKES: Final = 10  # of the validation predictions: ten events per parameter (Peduzzi et al. 1996)


def calibration_of(calibrate: bool | None, lr: object) -> CalibrationCallback | None:
    """The calibration of an argument; None chooses a temperature in the default step, which has no `lr`."""
    if calibrate is None:
        return LenientCalibration() if lr is None else None
    return Calibration() if calibrate else None


def beside(trainer: Trainer, callback: Callback, calibration: CalibrationCallback) -> None:
    """Put the calibration of a callback behind all that finish samples; its hooks run before the checkpoint's."""
    others = [other for other in callbacks_of(trainer, CalibrationCallback) if other is not calibration]
    if others and isinstance(calibration, LenientCalibration):
        return
    if others:
        raise UnsupportedTrainingError(
            "calibrate=True and Calibration both choose the width of the posterior. Remove one of them."
        )
    callbacks = callbacks_of(trainer, Callback)
    if calibration not in callbacks and callback in callbacks:
        finishing = [other for other in callbacks if isinstance(other, FinishesSamples)]
        insert_after(trainer, calibration, callback, *finishing)


@final
class LenientCalibration(CalibrationCallback):
    """Chooses a temperature at the end of a fit of a classifier, if outputs and targets are known and the fit was long."""

    def __init__(self) -> None:
        super().__init__()
        self._validation = ValidationSet("Calibration", "temperature", "lightning_bayes.calibrate")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask for inputs if there is BatchNorm; a hook of its own would cost every batch of every network."""
        super().on_train_epoch_start(trainer, pl_module)
        self.needs_inputs = bool(running_statistics(pl_module))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say that a checkpoint from before the end of the fit, such as the best one, has no temperature."""
        has_none = CALIBRATION_KEY not in checkpoint.get("callbacks", {})
        if has_none and self.scale is not None and trainer.state.fn != "fit":
            rank_zero_info(
                f"The temperature {self.temperature:.3g} belongs to the last weights of the fit. This checkpoint has none, "
                "so its predictions are as trained. calibrate=True chooses a temperature for each checkpoint."
            )
        super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def choose_in_fit(self, trainer: Trainer, module: LightningModule) -> None:
        """Choose a temperature, or leave the predictions as they are, and say why if the task is not known."""
        start, callback = time.perf_counter(), evaluation_of(trainer)
        link = callback.link_of(module)
        samples = None if _is_left_alone(trainer, link) else self.found_samples(trainer, module, link or "identity")
        batches = None if samples is None else self._affordable(callback, trainer, module, samples.count)
        if batches is None and isinstance(samples, PosteriorSamples) and samples.count > _FEWEST_SAMPLES:
            samples = PosteriorSamples(samples.posterior, _FEWEST_SAMPLES, samples.seed)
            batches = self._affordable(callback, trainer, module, samples.count)
        if samples is None or batches is None:
            return
        unknown = self._unknown(callback, link)
        at, first = ValidationOutputs(trainer, module, self._validation, batches), None
        (is_unknown,) = agreed(trainer, module, bool(unknown))
        if not is_unknown:
            samples = self.with_inputs(trainer, module, samples)
            first, unknown = _tried(at, samples, link)
            (is_unknown,) = agreed(trainer, module, bool(unknown))
        if link is None or first is None or is_unknown:
            rank_zero_info(
                f"{type(callback).__name__} chooses no temperature on the validation set: "
                f"{unknown or 'another process cannot'}. calibrate=False skips this."
            )
            return
        outputs, total = first.outputs, sum_over_processes(trainer, module)
        mistakes = int(total(_mistakes(first, link)))
        if mistakes < _FEWEST_MISTAKES:
            rank_zero_info(
                f"{type(callback).__name__} chooses no temperature: {mistakes} validation predictions are wrong, and fewer "
                f"than {_FEWEST_MISTAKES} do not tell one. calibrate=True chooses all the same."
            )
            return
        found = choose_calibration(lambda scale: outputs, first.targets, link, None, total, width=False, errors=_ERRORS)
        self.use(found, samples, start, at.rows, "")

    def _affordable(
        self, callback: EvaluationCallback, trainer: Trainer, module: LightningModule, samples: int
    ) -> list[Any] | None:
        """Batches that the budget allows, empty if there are no pairs; None after a short fit."""
        kept, most = self._kept, budget_of_fit(trainer, 1).batches(samples)
        if not most:
            return None
        seen = sum(map(rows_of, kept.batches)), callback.batch_rows, kept.other is not None
        rows, of_batch, has_others = agreed(trainer, module, *seen)
        if has_others:
            return []
        budget = budget_of_fit(trainer, of_batch, recalibrated_examples(trainer, module))
        if not budget.allows(rows, samples, fewest=_FEWEST_ROWS):
            return None
        return kept_rows(module, kept.batches, budget.rows(samples), max(1, int(of_batch)), most)

    def _unknown(self, callback: EvaluationCallback, link: Link | None) -> str:
        """Why the task is not known; empty if it is."""
        if link is None:
            return "the training loss does not tell how outputs become predictions"
        other = self._kept.other
        return callback.obstacle if other is None else f"the set yields a {other} instead of pairs (inputs, targets)"


def _is_left_alone(trainer: Trainer, link: Link | None) -> bool:
    """Whether a fit is a trial, no classifier's or not validated, or other callbacks need its samples as they are."""
    is_trial = bool(trainer.fast_dev_run or trainer.overfit_batches)  # type: ignore[attr-defined]
    is_trial |= not sum(trainer.num_val_batches)
    return is_trial or bool(callbacks_of(trainer, RejectorCallback)) or link not in {None, *CLASS_LINKS}


def _tried(at: ValidationOutputs, samples: Samples, link: Any) -> tuple[StepOutputs | None, str]:
    """The outputs under samples, and why they are no logits of the targets; empty if they are."""
    try:
        found = at.under(samples)
        return found, _mismatch(found, link)
    except Exception as error:  # of the user's network, which a fit without calibration does not call here
        if isinstance(error, Warning):  # the user asked for an error
            raise
        return None, f"{type(error).__name__}: {error}".rstrip(".")


def _mismatch(found: StepOutputs, link: Link) -> str:
    """Why outputs are no logits of their targets; empty if they are."""
    outputs, targets = found
    shape = outputs[0].movedim(1, -1).shape if link == "softmax" else outputs.shape[1:]
    has_one_class = link in CLASS_DIMS
    fits = targets.shape == shape[:-1] if has_one_class else targets.numel() == shape.numel()
    fits = fits and not (has_one_class and targets.is_floating_point())
    if not fits or not _are_labels(targets, shape[-1] if has_one_class else 2):
        return f"the targets are no labels of forward's outputs {list(outputs.shape[1:])}"
    return "" if bool(outputs.isfinite().all()) else "outputs are not finite"


def _mistakes(found: StepOutputs, link: Link) -> Tensor:
    """The number of examples with a wrong prediction."""
    outputs, targets = found
    if link in CLASS_DIMS:
        wrong = combine(outputs, link).argmax(1 if link == "softmax" else -1) != targets
    else:
        wrong = (combine(outputs, link) > 0) != (targets.reshape(outputs.shape[1:]) > 0.5)
    return wrong.reshape(len(targets), -1).any(1).sum().float()


def _are_labels(targets: Tensor, classes: int) -> bool:
    """Whether all targets are numbers from 0 to `classes` - 1; binary ones may be probabilities."""
    return bool(torch.all((targets >= 0) & (targets <= classes - 1)))
