"""Outputs of validation rows under samples, and the line that says what a calibration chose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_bayes.callbacks.loaders import OnDevice, ValidationSet
from lightning_bayes.callbacks.recalibration import recalibrated
from lightning_bayes.callbacks.spread import spread
from lightning_bayes.callbacks.step_outputs import StepOutputs
from lightning_bayes.callbacks.validation_rows import length, merged, rows_of, thinned
from lightning_bayes.predictive import Calibration as Chosen
from lightning_bayes.predictive import ClosedFormSamples, LinearizedSamples, PosteriorSamples, Samples
from lightning_bayes.predictive.repeated import Repeatable, copied
from lightning_bayes.predictive.samples import require_tensor

Scalable: TypeAlias = PosteriorSamples | LinearizedSamples | ClosedFormSamples


class ValidationOutputs(NamedTuple):
    """The module on batches of a validation set, which are on its device."""

    trainer: Trainer
    module: LightningModule
    validation: ValidationSet
    batches: list[Any]

    @property
    def rows(self) -> int:
        """The number of examples."""
        return sum(map(rows_of, self.batches))

    def under(self, samples: Samples) -> StepOutputs:
        """The outputs under samples."""
        prepared = spread(self.trainer, recalibrated(self.trainer, self.module, samples))

        def forward(inputs: Any) -> Tensor:
            return require_tensor(self.module, prepared.outputs(self.module, Repeatable(self.module, inputs)))

        # hooks of the network may change a batch
        return self.validation.evaluated(self.trainer, self.module, forward, map(copied, self.batches))

    def at_widths(self, samples: Samples) -> tuple[StepOutputs, Callable[[float], Tensor]]:
        """The outputs at width 1, and a function that returns those at any width."""
        if not isinstance(samples, Scalable):
            return (first := self.under(samples)), lambda scale: first.outputs
        whole = self.under(samples.scaled(1.0))
        if isinstance(samples, LinearizedSamples):  # linear in the width, f + c J (θ - μ)
            mean = self.under(samples.scaled(0.0)).outputs.expand_as(whole.outputs)
            return whole, lambda scale: torch.lerp(mean, whole.outputs, scale)
        return whole, lambda scale: whole.outputs if scale == 1 else self.under(samples.scaled(scale)).outputs


def kept_rows(module: LightningModule, kept: list[Any], rows: int, size: int, most: int | None = None) -> list[Any]:
    """Batches of up to `size` of about so many rows that a fit has kept, at most so many batches, on the device."""
    batches = merged(thinned(kept, len(kept), rows), size)
    count = len(batches) if most is None else min(most, len(batches))
    chosen = [batches[index * len(batches) // count] for index in range(count)]
    moved: list[Any] = move_data_to_device(chosen, module.device)
    return moved


def loaded_rows(trainer: Trainer, validation: ValidationSet, rows: int) -> list[Any]:
    """Batches of about so many rows of the validation set, loaded once, on the device."""
    limit = int(min(trainer.num_val_batches[0], 2**62)) if trainer.state.fn == "fit" else None
    loader = validation.loader(trainer)
    batches = OnDevice(trainer, loader, RunningStage.VALIDATING).loaded()
    return list(OnDevice(trainer, thinned(batches, length(loader, limit), rows), RunningStage.VALIDATING))


def line_of(found: Chosen, rows: int, tried: str, seconds: float, share: float) -> str:
    """What was chosen, of what was tried, why and in what time."""
    change = (
        f"the NLL falls from {found.nll_before:.4f} to {found.nll:.4f} (standard error {found.standard_error:.4f})"
        if found.choice != "neither"
        else f"the NLL is {found.nll:.4f}, and no change lowers it by enough standard errors"
    )
    return (
        f"Calibration on {rows} validation examples: {tried}temperature {found.temperature:.3g}; {change}. "
        f"It took {seconds:.1f} s{f', {share:.1%} of the fit' if share > 0 else ''}."
    )
