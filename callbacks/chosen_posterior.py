"""A posterior whose width, or temperature, the validation set chooses: what `PosteriorScale` and `Calibration` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_bayes.callbacks.arguments import checked
from lightning_bayes.callbacks.evaluation import EvaluationCallback
from lightning_bayes.callbacks.last_epoch import fit_kept, is_last_epoch
from lightning_bayes.callbacks.loaders import ValidationSet, random_state_kept, sum_over_processes
from lightning_bayes.callbacks.recalibration import recalibrated
from lightning_bayes.callbacks.spread import spread
from lightning_bayes.callbacks.step_outputs import StepOutputs
from lightning_bayes.curvature import Gaussian
from lightning_bayes.errors import PosteriorError, UnsupportedTrainingError
from lightning_bayes.optim.readout import SCALE_KEY
from lightning_bayes.posteriors import AbstractPosterior, ScaledPosterior
from lightning_bayes.predictive import (
    ClosedFormSamples,
    LinearizedSamples,
    Link,
    PosteriorSamples,
    Samples,
    evaluation_mode,
    predictive_nll,
)

_EXPANSIONS = (LinearizedSamples, ClosedFormSamples)
Reduce: TypeAlias = Callable[[Tensor], Tensor]  # sums over processes
OutputsAt: TypeAlias = Callable[[float], StepOutputs]  # validation outputs at a width
_Scalable: TypeAlias = PosteriorSamples | LinearizedSamples | ClosedFormSamples


class ChosenPosterior(Callback, ABC):
    """Chooses the width c ≥ 0 of the posterior of another callback on the validation set, at the end of a fit.

    Args:
        linearized: Whether predictions are linearised, see `LinearizedSamples`; None follows the callback with the
            posterior.
        refit: Whether to choose again before each evaluation even if the checkpoint has a width, such as for another number
            of samples.
    """

    number = "width"  # what is chosen, for messages
    function = "lightning_bayes.calibrate"  # that chooses it without a callback

    @checked
    def __init__(self, linearized: bool | None = None, refit: bool = False) -> None:
        self.linearized, self.refit = linearized, refit
        self.scale: float | None = None  # for the current posterior
        self.temperature = 1.0  # divides the logits of evaluations outside of a fit
        self._has_tried = False  # the first validation batch of the current fit
        self._is_linearized = False  # whether the scale was chosen for linearised predictions
        self._validation = ValidationSet(type(self).__name__, self.number, self.function)

    @abstractmethod
    def batches(self, trainer: Trainer, loader: Any, limit: int | None, count: int) -> Callable[[], Iterable[Any]]:
        """What yields the validation batches for `count` samples, of the first `limit` that the loader yields."""

    @abstractmethod
    def find(self, outputs_at: OutputsAt, link: Link, noise_std: float | None, reduce: Reduce) -> tuple[float, float]:
        """The width and the temperature."""

    @property
    def state_key(self) -> str:
        """The same key for any arguments, so that an evaluation can use other arguments."""
        return SCALE_KEY

    def state_dict(self) -> dict[str, Any]:
        """The width and the temperature, and whether they were chosen for linearised predictions."""
        return {"scale": self.scale, "linearized": self._is_linearized, "temperature": self.temperature}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a checkpoint's width and temperature."""
        self.scale, self._is_linearized = state_dict["scale"], state_dict["linearized"]
        self.temperature = state_dict.get("temperature", 1.0)

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
            raise PosteriorError(f"{type(self).__name__} has not chosen a width. Fit or test first.")
        return ScaledPosterior(posterior, self.scale, self._is_linearized, self.temperature)

    # -- during a fit -------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Require a validation set and a posterior."""
        self._validation.require(trainer)
        _evaluation_of(trainer)
        self._has_tried = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Discard the width, which this update invalidates."""
        self.scale, self.temperature = None, 1.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Try the first validation batch after the first update of a fit, when the link is known."""
        if self._has_tried:
            return
        self._has_tried = True
        callback = _evaluation_of(trainer)
        link = callback.link_of(pl_module)
        with evaluation_mode(pl_module), random_state_kept(pl_module), torch.no_grad():
            samples = callback.find_samples(trainer, pl_module)
            if samples is not None:
                self._scalable(samples)  # raises if they are not of a posterior

            def forward(inputs: Any) -> Tensor:
                return torch.as_tensor(pl_module(inputs))[None]

            first = self._validation.outputs(trainer, pl_module, forward, islice(self._validation.loader(trainer), 1))
            if link is not None:
                predictive_nll(first.outputs, first.targets, link, None, lambda total: total)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaders."""
        self._validation.keep(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the width after the last epoch, before the checkpoint is written."""
        if not is_last_epoch(trainer):
            return
        with fit_kept(type(self).__name__, "a width"):
            self._choose_in_fit(trainer, pl_module)

    def _choose_in_fit(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callback = _evaluation_of(trainer)
        with evaluation_mode(pl_module), random_state_kept(pl_module), torch.no_grad():
            samples = callback.find_samples(trainer, pl_module)
            if samples is None:
                return
            link = callback.link_or_raw(pl_module)
            self._choose(trainer, pl_module, self._scalable(samples), link)
        pl_module.log("val/posterior_scale", float(self.scale or 0.0), sync_dist=True)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def finished_samples(self, trainer: Trainer, module: LightningModule, samples: Samples, link: Link) -> Samples:
        """Samples of an evaluation outside of a fit, at the chosen width, which is chosen first if necessary."""
        scalable = self._scalable(samples)
        predictive_changed = self._is_linearized != isinstance(scalable, _EXPANSIONS)
        if self.scale is None or self.refit or predictive_changed:
            with random_state_kept(module):
                self._choose(trainer, module, scalable, link)
        return scalable.scaled(float(self.scale or 0.0))

    def _scalable(self, samples: Samples) -> _Scalable:
        if isinstance(samples, ClosedFormSamples) and self.linearized is None:
            return samples
        weight_samples = samples.samples if isinstance(samples, _EXPANSIONS) else samples
        if not isinstance(weight_samples, PosteriorSamples):
            raise UnsupportedTrainingError(
                f"{type(self).__name__} changes the width of a posterior over weights, but {type(samples).__name__} have "
                "none. Use it with a callback such as VOGNCallback."
            )
        linearized = isinstance(samples, _EXPANSIONS) if self.linearized is None else self.linearized
        return LinearizedSamples(weight_samples) if linearized else weight_samples

    def _choose(self, trainer: Trainer, module: LightningModule, samples: _Scalable, link: Link) -> None:
        loader = self._validation.loader(trainer)
        limit = int(min(trainer.num_val_batches[0], 2**62)) if trainer.state.fn == "fit" else None
        batches = self.batches(trainer, loader, limit, samples.count)

        def evaluate(scaled: Samples) -> StepOutputs:
            prepared = spread(trainer, recalibrated(trainer, module, scaled))

            def forward(inputs: Any) -> Tensor:
                return prepared.outputs(module, partial(module, inputs))

            return self._validation.outputs(trainer, module, forward, batches())

        linear_outputs = _linear_in_scale(samples, evaluate) if isinstance(samples, LinearizedSamples) else None
        likelihood = getattr(module, "lightning_bayes_likelihood", None)
        noise_std = likelihood.std if isinstance(likelihood, Gaussian) else None

        def outputs_at(scale: float) -> StepOutputs:
            return evaluate(samples.scaled(scale)) if linear_outputs is None else linear_outputs(scale)

        found = self.find(outputs_at, link, noise_std, sum_over_processes(trainer, module))
        (self.scale, self.temperature), self._is_linearized = found, isinstance(samples, _EXPANSIONS)


def _linear_in_scale(
    samples: LinearizedSamples, evaluate: Callable[[Samples], StepOutputs]
) -> Callable[[float], StepOutputs]:
    """Outputs as a function of the width: they are linear in it, f + c J (θ - μ), so two evaluations suffice."""
    mean, drawn = evaluate(samples.scaled(0.0)), evaluate(samples)
    return lambda scale: StepOutputs(
        torch.lerp(mean.outputs.expand_as(drawn.outputs), drawn.outputs, scale), mean.targets
    )


def _evaluation_of(trainer: Trainer) -> EvaluationCallback:
    callbacks = [c for c in trainer.callbacks if isinstance(c, EvaluationCallback)]  # type: ignore[attr-defined]
    if not callbacks:
        raise UnsupportedTrainingError(
            "The width of a posterior is to be chosen, but no callback of this trainer has one. Add VOGNCallback()."
        )
    return callbacks[0]
