"""Samples on the validation rows that a fit has kept: how many it may run, their outputs, and whether targets are labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor

from lightning_bayes.callbacks.calibrating.point_estimate import PointSamples
from lightning_bayes.callbacks.evaluation.spread import spread
from lightning_bayes.callbacks.evaluation.validation_rows import length, merged, rows_of, thinned
from lightning_bayes.callbacks.recalibration import recalibrated, recalibrated_examples
from lightning_bayes.callbacks.trainer.batch_reader import BatchReader
from lightning_bayes.callbacks.trainer.loaders import OnDevice, ValidationSet, sum_over_processes
from lightning_bayes.likelihood import Labels, leaf_at
from lightning_bayes.predictive import ClosedFormSamples, LinearizedSamples, PosteriorSamples, Samples
from lightning_bayes.predictive.labelled import LabelledBatches

Scalable: TypeAlias = PosteriorSamples | LinearizedSamples | ClosedFormSamples  # whose width can be chosen
SHARE: Final = 0.15  # calls of the network at the end of a fit, for each of its batches
_NO_TARGET: Final = -100  # that torch's losses ignore by default


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


@final
class HeldOut:
    """The module on labelled batches of a validation set, which are on its device."""

    def __init__(self, trainer: Trainer, module: LightningModule, reader: BatchReader, batches: list[Any]) -> None:
        self.trainer, self.module, self.rows = trainer, module, sum(map(rows_of, batches))
        self._batches = [_without_graph(reader.labels(batch)) for batch in batches]
        self.labelled = LabelledBatches(module, reader.likelihood, self._batches)

    def at_widths(self, samples: Samples) -> Callable[[float], Tensor]:
        """A function that returns the outputs under samples at any width, ``[S, B, …]``."""
        if not isinstance(samples, Scalable):
            first = self._under(samples)
            return lambda scale: first
        whole = self._under(samples.scaled(1.0))
        if isinstance(samples, LinearizedSamples):  # linear in the width, f + c J (θ - μ)
            mean = self._under(samples.scaled(0.0)).expand_as(whole)
            return lambda scale: torch.lerp(mean, whole, scale)
        return lambda scale: whole if scale == 1 else self._under(samples.scaled(scale))

    def alone(self, samples: Samples) -> Tensor:
        """The outputs without sampling, ``[1, B, …]``: at the mean, or of the fit's own network."""
        with self._prepared(samples).at_mean(self.module), self.trainer.precision_plugin.forward_context():
            return self.labelled.outputs(PointSamples())

    def _under(self, samples: Samples) -> Tensor:
        prepared = self._prepared(samples)
        with self.trainer.precision_plugin.forward_context():
            return self.labelled.outputs(prepared)

    def _prepared(self, samples: Samples) -> Samples:
        return spread(self.trainer, recalibrated(self.trainer, self.module, samples))

    def mismatch(self, outputs: Tensor) -> str:
        """Why a classifier's outputs are no logits of the targets; empty if they are."""
        shape = list(outputs.shape[1:])
        if any(_has_strangers(batch, shape) for batch in self._batches):
            return f"the targets are no labels of forward's outputs {shape}"
        return "" if bool(outputs.isfinite().all()) else "outputs are not finite"


def _without_graph(labels: Labels) -> Labels:
    terms = labels.of_step
    return labels if terms is None else labels._replace(of_step=[term._replace(outputs=None) for term in terms])


def _has_strangers(labels: Labels, shape: list[int]) -> bool:
    """Whether a batch has targets that are neither classes of outputs ``[B, …]`` nor ignored."""
    for scored in labels.scored:
        targets = leaf_at(labels.batch, scored.targets.path or ())
        last = (
            shape[scored.kind.classes] - 1 if hasattr(scored.kind, "classes") else 1
        )  # binary ones may be probabilities
        counts = (targets != _NO_TARGET) & (targets != scored.targets.ignored) & (targets == targets)
        if bool((counts & ((targets < 0) | (targets > last))).any()):
            return True
    return False


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
