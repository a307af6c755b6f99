"""Chooses the width of a trained posterior and a temperature on the validation set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_bayes.callbacks.arguments import checked
from lightning_bayes.callbacks.calibration_base import CalibrationCallback, evaluation_of
from lightning_bayes.callbacks.calibration_budget import FEWEST_ROWS, agreed, budget_of_fit
from lightning_bayes.callbacks.calibration_outputs import Scalable, ValidationOutputs, kept_rows, loaded_rows
from lightning_bayes.callbacks.evaluation import EvaluationCallback
from lightning_bayes.callbacks.loaders import ValidationSet, random_state_kept, sum_over_processes
from lightning_bayes.callbacks.neighbours import callbacks_of, insert_after
from lightning_bayes.callbacks.recalibration import recalibrated_examples
from lightning_bayes.callbacks.training_inputs import FIRST_BATCHES
from lightning_bayes.callbacks.validation_rows import rows_of
from lightning_bayes.errors import PosteriorError
from lightning_bayes.likelihood import Gaussian
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive import (
    LinearizedSamples,
    Link,
    PosteriorSamples,
    Samples,
    choose_calibration,
    evaluation_mode,
    predictive_nll,
)
from lightning_bayes.predictive.calibration import EVALUATIONS
from lightning_bayes.predictive.samples import require_tensor

_NO_OTHER = " (no other was tried)"


@final
class Calibration(CalibrationCallback):
    """Chooses the width of the posterior and a temperature on the validation set: one of them, both or neither.

    ``calibrate=True`` of a callback such as `VOGNCallback` adds it; by default, such a callback chooses a temperature only.
    At the end of a fit it chooses the width c ≥ 0 of the posterior, Σ → c² Σ, and for classifiers the temperature that
    divides the logits of every sample. Something is changed only if the validation NLL falls by more than one standard error
    of the paired difference; see `lightning_bayes.calibrate`. Samples without a width, such as dropout or an ensemble, get a
    temperature only; so does a network without any other callback.

    After a linear layer or a convolution, BatchNorm then subtracts the mean of each weight sample; see `ScaledPosterior`.

    Both numbers are logged as ``val/posterior_scale`` and ``val/temperature`` and saved in the checkpoint. Tests,
    validations and predictions outside of a fit use them, for any module, and `load_posterior` returns them. For a
    checkpoint without them, they are chosen first.

    The module is called on the inputs of batches ``(inputs, targets)``. The likelihood follows from the link of the
    evaluation. With the identity link, the noise comes from the module's ``lightning_bayes_likelihood``, if it is a
    `lightning_bayes.curvature.Gaussian`; otherwise σ is fitted at each width.

    It calls the network at most .15 times as often as the fit has batches, on validation examples that are spread over the
    set. If that is not enough for widths on 200 examples, it chooses a temperature only. The line at the end of the fit says
    what was chosen and how long it took.

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
        super().__init__()
        self.linearized, self.refit = linearized, refit
        self._has_tried = False  # the first validation batch of the current fit
        self._validation = ValidationSet("Calibration", "width and temperature", "lightning_bayes.calibrate")

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
        return ScaledPosterior(posterior, self.scale, self._is_linearized, self.temperature, self._input_means)

    # -- during a fit -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add an evaluation to a trainer without one, so that a network alone gets a temperature."""
        if not callbacks_of(trainer, EvaluationCallback):
            insert_after(trainer, PointEstimate(), self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Require a validation set."""
        super().on_train_start(trainer, pl_module)
        self._validation.require(trainer)
        self._has_tried = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the first batches of an epoch."""
        if batch_idx < FIRST_BATCHES:
            self.see(pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Try the first validation batch after the first update of a fit, when the link is known."""
        if self._has_tried:
            return
        self._has_tried = True
        link = evaluation_of(trainer).link_of(pl_module)
        with evaluation_mode(pl_module), random_state_kept(pl_module), torch.no_grad():

            def forward(inputs: Any) -> Tensor:
                return torch.as_tensor(pl_module(inputs))[None]

            first = self._validation.outputs(trainer, pl_module, forward, self._validation.loader(trainer), 1)
            if link is not None:
                predictive_nll(first.outputs, first.targets, link, None, lambda total: total)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaders."""
        super().on_validation_epoch_start(trainer, pl_module)
        self._validation.keep(trainer)

    def choose_in_fit(self, trainer: Trainer, module: LightningModule) -> None:
        """Choose width and temperature."""
        link = evaluation_of(trainer).link_or_raw(module)
        samples = self.found_samples(trainer, module, link)
        if samples is not None:
            self._choose(trainer, module, self._followed(self.with_inputs(trainer, module, samples)), link)

    def finished_samples(self, trainer: Trainer, module: LightningModule, samples: Samples, link: Link) -> Samples:
        """Samples of an evaluation outside of a fit, at the chosen width, which is chosen first if necessary."""
        followed = self._followed(samples)
        scaled = super().finished_samples(trainer, module, followed, link)
        if self.scale is None or self.refit:
            with random_state_kept(module):
                self._choose(trainer, module, self.centred(followed, module), link)
            scaled = super().finished_samples(trainer, module, followed, link)
        return scaled

    def _followed(self, samples: Samples) -> Samples:
        """The samples, linearised as asked."""
        if not isinstance(samples, Scalable) or self.linearized is None:
            return samples
        weight_samples = samples if isinstance(samples, PosteriorSamples) else samples.samples
        return LinearizedSamples(weight_samples) if self.linearized else weight_samples

    def _choose(self, trainer: Trainer, module: LightningModule, samples: Samples, link: Link) -> None:
        """Choose as asked; the width as well, unless the fit was too short for it."""
        start, is_fit = time.perf_counter(), trainer.state.fn == "fit"
        tries_widths, rows = isinstance(samples, Scalable), 5 * FEWEST_ROWS
        of_batch = evaluation_of(trainer).batch_rows
        if is_fit:
            seen, of_batches = agreed(trainer, module, sum(map(rows_of, self._kept.batches)), of_batch)
            budget = budget_of_fit(trainer, of_batches, recalibrated_examples(trainer, module))
            is_affordable = link == "identity" or budget.allows(seen or FEWEST_ROWS, samples.count, EVALUATIONS)
            tries_widths = tries_widths and is_affordable
            rows = max(FEWEST_ROWS, budget.rows(samples.count, EVALUATIONS if tries_widths else 1))
        if is_fit and self._kept.batches:
            batches = kept_rows(module, self._kept.batches, rows, of_batch or FEWEST_ROWS)
        else:
            batches = loaded_rows(trainer, self._validation, rows)
        at = ValidationOutputs(trainer, module, self._validation, batches)
        first, outputs_at = at.at_widths(samples)
        likelihood = getattr(module, "lightning_bayes_likelihood", None)
        std, total = likelihood.std if isinstance(likelihood, Gaussian) else None, sum_over_processes(trainer, module)
        found = choose_calibration(outputs_at, first.targets, link, std, total, tries_widths)
        self.use(found, samples, start, at.rows, f"width {found.scale:.3g}{'' if tries_widths else _NO_OTHER}, ")


class PointSamples(Samples):
    """The network as it is, as one sample."""

    count, has_mean = 1, False

    def subset_outputs(self, model: nn.Module, forward: Callable[[], Tensor], indices: Iterable[int]) -> Tensor:
        """Run `forward` once for each index."""
        return torch.stack([require_tensor(model, forward()) for _ in indices])


@final
class PointEstimate(EvaluationCallback):
    """Evaluates the user's network outside of a fit, where other callbacks may change its predictions."""

    opt_out_hint = "remove Calibration"

    def __init__(self) -> None:
        super().__init__(None)

    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> Samples | None:
        """The network; None for validation in a fit, which stays as it is."""
        return None if trainer.state.fn == "fit" and trainer.validating else PointSamples()

    def state_dict(self) -> dict[str, Any]:
        """What the training loss told."""
        return self.loss_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what the training loss told."""
        self.load_loss_state(state_dict)
