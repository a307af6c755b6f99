"""Callbacks that change the samples of an evaluation, such as `Calibration`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer

from lightning_bayes.callbacks.trainer.neighbours import callbacks_of
from lightning_bayes.predictive import Samples


@runtime_checkable
class FinishesSamples(Protocol):
    """A callback that changes the samples of evaluations outside of a fit, such as `Calibration`."""

    def finished_samples(self, trainer: Trainer, module: LightningModule, samples: Samples) -> Samples:
        """Samples to evaluate under instead of `samples`."""
        ...


def finished(
    trainer: Trainer, module: LightningModule, samples: Samples, but: FinishesSamples | None = None
) -> tuple[Samples, float]:
    """The samples that all callbacks `but` one make of these, one after the other, and the product of their temperatures."""
    temperature = 1.0
    for callback in callbacks_of(trainer, FinishesSamples):
        if callback is not but:
            samples = callback.finished_samples(trainer, module, samples)
            temperature *= getattr(callback, "temperature", 1.0)
    return samples, temperature
