"""Samples on the validation rows that a fit has kept: how many it may run, their outputs, and what averaging changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_bayes.callbacks.evaluation.mean_comparison import Comparison, class_last, uncertainty_of
from lightning_bayes.callbacks.evaluation.spread import spread
from lightning_bayes.callbacks.evaluation.validation_rows import length, merged, rows_of, thinned
from lightning_bayes.callbacks.recalibration import recalibrated, recalibrated_examples
from lightning_bayes.callbacks.trainer.loaders import OnDevice, ValidationSet, sum_over_processes
from lightning_bayes.callbacks.trainer.step_outputs import StepOutputs
from lightning_bayes.metrics.paired import PairedClassification
from lightning_bayes.predictive import ClosedFormSamples, LinearizedSamples, Link, PosteriorSamples, Samples
from lightning_bayes.predictive.links import CLASS_DIMS, predicted
from lightning_bayes.predictive.repeated import Repeatable, copied
from lightning_bayes.predictive.samples import require_tensor

Scalable: TypeAlias = PosteriorSamples | LinearizedSamples | ClosedFormSamples  # whose width can be chosen
SHARE: Final = 0.15  # calls of the network at the end of a fit, for each of its batches


class Budget(NamedTuple):
    """What the end of a fit may run: counted, not timed, so that every process and a resumed fit find the same."""

    calls: float  # of the network, each under one sample
    rows_of_batch: float
    others: int = 0  # rows that each evaluation runs beside its own, for BatchNorm statistics

    def batches(self, samples: int) -> int:
        """The number of batches that may be evaluated once."""
        return int(self.calls / (samples + 1))  # and once without sampling

    def rows(self, samples: int, evaluations: int = 1) -> int:
        """The number of rows that may be evaluated so often."""
        return max(0, int(self.calls * self.rows_of_batch / ((samples + 1) * evaluations)) - self.others)


def budget_of_fit(trainer: Trainer, module: LightningModule, rows_of_batch: float) -> Budget:
    """The budget of the fit that ends now, the same in every process."""
    calls = SHARE * (trainer.fit_loop.total_batch_idx + 1)
    return Budget(calls, agreed(trainer, module, rows_of_batch), recalibrated_examples(trainer, module))


def agreed(trainer: Trainer, module: LightningModule, value: float) -> float:
    """The mean of a number over processes, which then all decide the same."""
    return float(sum_over_processes(trainer, module)(torch.tensor(float(value)))) / trainer.world_size


class HeldOut(NamedTuple):
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
        """The outputs under samples, ``[S, B, …]``."""
        prepared = self._prepared(samples)

        def forward(inputs: Any) -> Tensor:
            return require_tensor(self.module, prepared.outputs(self.module, Repeatable(self.module, inputs)))

        # hooks of the network may change a batch
        return self.validation.evaluated(self.trainer, self.module, forward, map(copied, self.batches))

    def alone(self, samples: Samples) -> StepOutputs:
        """The outputs without sampling, ``[1, B, …]``: at the mean, or of the fit's own network."""
        prepared = self._prepared(samples)

        def forward(inputs: Any) -> Tensor:
            with prepared.at_mean(self.module):
                return torch.as_tensor(self.module(inputs))[None]

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

    def _prepared(self, samples: Samples) -> Samples:
        return spread(self.trainer, recalibrated(self.trainer, self.module, samples))


def linearised(samples: Samples, linearized: bool | None) -> Samples:
    """Samples of the predictive that was asked for; None leaves them as they are."""
    if not isinstance(samples, Scalable) or linearized is None:
        return samples
    weight_samples = samples if isinstance(samples, PosteriorSamples) else samples.samples
    return LinearizedSamples(weight_samples) if linearized else weight_samples


def kept_rows(module: LightningModule, kept: list[Any], rows: int, size: int, most: int) -> list[Any]:
    """About so many rows that a fit has kept, in at most so many batches of up to `size`, on the device."""
    batches = merged(thinned(kept, len(kept), rows), size) if kept and rows else []
    count = min(most, len(batches))
    chosen = [batches[index * len(batches) // count] for index in range(count)]
    moved: list[Any] = move_data_to_device(chosen, module.device)
    return moved


def loaded_rows(trainer: Trainer, validation: ValidationSet, rows: int) -> list[Any]:
    """Batches of about so many rows of the validation set, loaded once, on the device."""
    loader = validation.loader(trainer)
    batches = OnDevice(trainer, loader, RunningStage.VALIDATING).loaded()
    return list(OnDevice(trainer, thinned(batches, length(loader, None), rows), RunningStage.VALIDATING))


def mismatch(found: StepOutputs, link: Link) -> str:
    """Why outputs are no logits of their targets; empty if they are."""
    outputs, targets = found
    shape = outputs[0].movedim(1, -1).shape if link == "softmax" else outputs.shape[1:]
    has_one_class = link in CLASS_DIMS
    fits = targets.shape == shape[:-1] if has_one_class else targets.numel() == shape.numel()
    fits = fits and not (has_one_class and targets.is_floating_point())
    classes = shape[-1] if has_one_class else 2
    if not fits or not bool(torch.all((targets >= 0) & (targets <= classes - 1))):  # binary ones may be probabilities
        return f"the targets are no labels of forward's outputs {list(outputs.shape[1:])}"
    return "" if bool(outputs.isfinite().all()) else "outputs are not finite"


def compared(
    outputs: Tensor, alone: Tensor, targets: Tensor, link: Link, reduce: Callable[[Tensor], Tensor], beside: str
) -> Comparison:
    """The average over samples ``[S, B, …]`` of a classifier's logits beside the network alone, ``[1, B, …]``."""
    scores, labels = PairedClassification(), targets.reshape(outputs.shape[1:]) if link == "sigmoid" else targets
    first, second = (class_last(predicted(each, link).mean(0), link) for each in (outputs, alone))
    scores.update(first, second, labels.long())
    uncertainty = uncertainty_of(outputs, link).double()
    count, total = reduce(torch.stack([torch.ones_like(uncertainty), uncertainty]).sum(1)).tolist()
    return Comparison(scores.compute(reduce), int(count), total / count, len(outputs), beside)
