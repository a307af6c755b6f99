"""Chooses the width of a trained posterior and a temperature on the validation set."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_bayes.callbacks.arguments import checked
from lightning_bayes.callbacks.evaluation import EvaluationCallback, FinishesSamples, finished
from lightning_bayes.callbacks.last_epoch import fit_kept, is_last_epoch
from lightning_bayes.callbacks.loaders import OnDevice, ValidationSet, random_state_kept, sum_over_processes
from lightning_bayes.callbacks.neighbours import callbacks_of, insert_after
from lightning_bayes.callbacks.point_estimate import PointEstimate
from lightning_bayes.callbacks.recalibration import recalibrated
from lightning_bayes.callbacks.spread import spread
from lightning_bayes.callbacks.step_outputs import StepOutputs
from lightning_bayes.callbacks.validation_rows import length, rows_of, thinned
from lightning_bayes.curvature import Gaussian
from lightning_bayes.errors import PosteriorError, UnsupportedTrainingError
from lightning_bayes.optim.readout import CALIBRATION_KEY
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive import Calibration as Chosen
from lightning_bayes.predictive import (
    ClosedFormSamples,
    LinearizedSamples,
    Link,
    PosteriorSamples,
    Samples,
    choose_calibration,
    evaluation_mode,
    predictive_nll,
)
from lightning_bayes.predictive.calibration import EVALUATIONS
from lightning_bayes.predictive.repeated import Repeatable

SHARE = 0.05  # of the passes of the fit
FEWEST_ROWS = 200  # also in a short fit
_PASSES_OF_A_STEP = 3  # forward and backward, in forward passes
_EXPANSIONS = (LinearizedSamples, ClosedFormSamples)
_Scalable: TypeAlias = PosteriorSamples | LinearizedSamples | ClosedFormSamples


@final
class Calibration(Callback):
    """Chooses the width of the posterior and a temperature on the validation set: one of them, both or neither.

    ``calibrate=True`` of a callback such as `VOGNCallback` adds it. At the end of a fit it chooses the width c ≥ 0 of the
    posterior, Σ → c² Σ, and for classifiers the temperature that divides the logits of every sample. Something is changed
    only if the validation NLL falls by more than one standard error of the paired difference; see
    `lightning_bayes.calibrate`. Samples without a width, such as dropout or an ensemble, get a temperature only; so does a
    network without any other callback.

    Both numbers are logged as ``val/posterior_scale`` and ``val/temperature`` and saved in the checkpoint. Tests,
    validations and predictions outside of a fit use them, for any module, and `load_posterior` returns them. For a
    checkpoint without them, they are chosen first.

    The module is called on the inputs of batches ``(inputs, targets)``. The likelihood follows from the link of the
    evaluation. With the identity link, the noise comes from the module's ``lightning_bayes_likelihood``, if it is a
    `lightning_bayes.curvature.Gaussian`; otherwise σ is fitted at each width.

    It uses about five per cent of the passes of the fit, on validation examples that are spread over the set. If that is not
    enough for widths on 200 examples, it chooses a temperature only. The line at the end of the fit says what was chosen and
    how long it took.

    Args:
        linearized: Whether predictions are linearised, see `LinearizedSamples`; None follows the callback with the
            posterior.
        refit: Whether to choose again before each evaluation even if the checkpoint has a width, such as for another number
            of samples.

    Attributes:
        scale: c of the current posterior; None if it is not chosen yet.
        temperature: The temperature.
        seconds: The time that the last choice took.
    """

    @checked
    def __init__(self, linearized: bool | None = None, refit: bool = False) -> None:
        self.linearized, self.refit = linearized, refit
        self.scale: float | None = None
        self.temperature, self.seconds = 1.0, 0.0
        self._is_linearized = False  # whether the scale was chosen for linearised predictions
        self._has_tried = False  # the first validation batch of the current fit
        self._rows_of_batch = 0  # of the fit
        self._start_of_fit = math.inf
        self._validation = ValidationSet("Calibration", "width and temperature", "lightning_bayes.calibrate")

    @property
    def state_key(self) -> str:
        """The same key for any arguments, so that an evaluation can use other arguments."""
        return CALIBRATION_KEY

    def state_dict(self) -> dict[str, Any]:
        """The width and the temperature, and whether they were chosen for linearised predictions."""
        return {"scale": self.scale, "linearized": self._is_linearized, "temperature": self.temperature}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a checkpoint's width and temperature."""
        self.scale, self._is_linearized = state_dict["scale"], state_dict["linearized"]
        self.temperature = state_dict["temperature"]

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
        return ScaledPosterior(posterior, self.scale, self._is_linearized, self.temperature)

    # -- during a fit -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add an evaluation to a trainer without one, so that a network alone gets a temperature."""
        if not callbacks_of(trainer, EvaluationCallback):
            insert_after(trainer, PointEstimate(), self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Require a validation set, and start the clock."""
        self._validation.require(trainer)
        self._has_tried, self._start_of_fit = False, time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discard the width, which this update invalidates, and count the rows of a batch."""
        self.scale, self.temperature = None, 1.0
        self._rows_of_batch = max(self._rows_of_batch, rows_of(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Try the first validation batch after the first update of a fit, when the link is known."""
        if self._has_tried:
            return
        self._has_tried = True
        link = _evaluation_of(trainer).link_of(pl_module)
        with evaluation_mode(pl_module), random_state_kept(pl_module), torch.no_grad():

            def forward(inputs: Any) -> Tensor:
                return torch.as_tensor(pl_module(inputs))[None]

            first = self._validation.outputs(trainer, pl_module, forward, self._validation.loader(trainer), 1)
            if link is not None:
                predictive_nll(first.outputs, first.targets, link, None, lambda total: total)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaders."""
        self._validation.keep(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose after the last epoch, before the checkpoint is written."""
        if not is_last_epoch(trainer):
            return
        with fit_kept("Calibration", "a width"), evaluation_mode(pl_module), random_state_kept(pl_module):
            self._choose_in_fit(trainer, pl_module)

    @torch.no_grad()
    def _choose_in_fit(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callback = _evaluation_of(trainer)
        samples, link = callback.find_samples(trainer, pl_module), callback.link_or_raw(pl_module)
        if samples is None:
            return
        samples, _ = finished(trainer, pl_module, samples, link, but=self)
        self._choose(trainer, pl_module, self._followed(samples), link)
        chosen = {"val/posterior_scale": float(self.scale or 0.0), "val/temperature": self.temperature}
        pl_module.log_dict(chosen, sync_dist=True)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def finished_samples(self, trainer: Trainer, module: LightningModule, samples: Samples, link: Link) -> Samples:
        """Samples of an evaluation outside of a fit, at the chosen width, which is chosen first if necessary."""
        followed = self._followed(samples)
        predictive_changed = self._is_linearized != isinstance(followed, _EXPANSIONS)
        if self.scale is None or self.refit or predictive_changed:
            with random_state_kept(module):
                self._choose(trainer, module, followed, link)
        return followed.scaled(float(self.scale or 0.0)) if isinstance(followed, _Scalable) else followed

    def _followed(self, samples: Samples) -> Samples:
        """The samples, linearised as asked."""
        if not isinstance(samples, _Scalable) or self.linearized is None:
            return samples
        weight_samples = samples if isinstance(samples, PosteriorSamples) else samples.samples
        return LinearizedSamples(weight_samples) if self.linearized else weight_samples

    def _choose(self, trainer: Trainer, module: LightningModule, samples: Samples, link: Link) -> None:
        start = time.perf_counter()
        batches, passes = self._budgeted(trainer, samples)
        rows = sum(map(rows_of, batches))
        allows_widths = rows * EVALUATIONS * samples.count <= 1.5 * passes  # the rows are a rough number
        tries_widths = isinstance(samples, _Scalable) and (allows_widths or link == "identity")

        def evaluate(scaled: Samples) -> StepOutputs:
            prepared = spread(trainer, recalibrated(trainer, module, scaled))

            def forward(inputs: Any) -> Tensor:
                return prepared.outputs(module, Repeatable(module, inputs))

            fresh = map(copy.deepcopy, batches)  # hooks may act in place
            return self._validation.outputs(trainer, module, forward, fresh)

        first = evaluate(samples.scaled(1.0) if isinstance(samples, _Scalable) else samples)
        likelihood = getattr(module, "lightning_bayes_likelihood", None)
        found = choose_calibration(
            _outputs_at(samples, evaluate, first),
            first.targets,
            link,
            likelihood.std if isinstance(likelihood, Gaussian) else None,
            sum_over_processes(trainer, module),
            tries_widths,
        )
        self.scale, self.temperature = found.scale, found.temperature
        self._is_linearized = isinstance(samples, _EXPANSIONS)
        self.seconds = time.perf_counter() - start
        spent = self.seconds / (start - self._start_of_fit)
        rank_zero_info(_line(found, rows, tries_widths, self.seconds, spent))

    def _budgeted(self, trainer: Trainer, samples: Samples) -> tuple[list[Any], float]:
        """Validation batches of the rows that the budget allows, loaded once, and the forward passes of that budget."""
        is_fit = trainer.state.fn == "fit"
        limit = int(min(trainer.num_val_batches[0], 2**62)) if is_fit else None
        steps = trainer.fit_loop.total_batch_idx + 1 if is_fit else math.inf
        passes = SHARE * _PASSES_OF_A_STEP * steps * self._rows_of_batch if is_fit else math.inf
        rows = max(FEWEST_ROWS, int(passes / (EVALUATIONS * samples.count)) if is_fit else 5 * FEWEST_ROWS)
        loader = self._validation.loader(trainer)
        batches = OnDevice(trainer, loader, RunningStage.VALIDATING).loaded()
        return thinned(batches, length(loader, limit), rows), passes


def beside(trainer: Trainer, callback: Callback, calibration: Calibration) -> None:
    """Put the calibration of a callback behind all that finish samples; its hooks run before the checkpoint's."""
    others = [other for other in callbacks_of(trainer, Calibration) if other is not calibration]
    if others:
        raise UnsupportedTrainingError(
            "calibrate=True and Calibration both choose the width of the posterior. Remove one of them."
        )
    callbacks = callbacks_of(trainer, Callback)
    if calibration not in callbacks and callback in callbacks:
        finishing = [other for other in callbacks if isinstance(other, FinishesSamples)]
        insert_after(trainer, calibration, callback, *finishing)


def _outputs_at(
    samples: Samples, evaluate: Callable[[Samples], StepOutputs], first: StepOutputs
) -> Callable[[float], Tensor]:
    """Outputs at a width. Linearised ones are linear in it, f + c J (θ - μ), so two evaluations suffice."""
    if isinstance(samples, LinearizedSamples):
        mean = evaluate(samples.scaled(0.0)).outputs.expand_as(first.outputs)
        return lambda scale: torch.lerp(mean, first.outputs, scale)

    def outputs(scale: float) -> Tensor:
        scalable: Any = samples
        return first.outputs if scale == 1 else evaluate(scalable.scaled(scale)).outputs

    return outputs


def _line(found: Chosen, rows: int, tries_widths: bool, seconds: float, share: float) -> str:
    """What was chosen, why and in what time."""
    width = f"{found.scale:.3g}{'' if tries_widths else ' (no other was tried)'}"
    change = (
        f"the NLL falls from {found.nll_before:.4f} to {found.nll:.4f} (standard error {found.standard_error:.4f})"
        if found.choice != "neither"
        else f"the NLL is {found.nll:.4f}, and no change lowers it by more than its standard error"
    )
    return (
        f"Calibration on {rows} validation examples: width {width}, temperature {found.temperature:.3g}; {change}. "
        f"It took {seconds:.1f} s{f', {share:.1%} of the fit' if share > 0 else ''}."
    )


def _evaluation_of(trainer: Trainer) -> EvaluationCallback:
    """The callback whose predictions are calibrated."""
    return next(callback for callback in callbacks_of(trainer, EvaluationCallback) if callback.averages(trainer))
