"""The number of weight samples of an evaluation."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_bayes.callbacks.temperature import TemperatureScaling

FEW = 3  # for validation in a fit, which runs in every epoch


def sample_count(trainer: Trainer, eval_samples: int, stated: int | None) -> int:
    """The number of weight samples of the current evaluation.

    Args:
        trainer: The trainer.
        eval_samples: S, for tests, predictions and the choice of a width at the end of a fit.
        stated: Number for validation inside a fit; None for the default.

    Returns:
        S, except in validation inside a fit: there `stated`, by default 3, or S if S is smaller or if validation fits a
        temperature for S samples.
    """
    if trainer.state.fn != "fit" or trainer.training:
        return eval_samples
    if stated is not None:
        return stated
    scales = any(isinstance(callback, TemperatureScaling) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return eval_samples if scales else min(FEW, eval_samples)
