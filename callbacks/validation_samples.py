"""How many forwards validation inside a fit costs."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_bayes.callbacks.temperature import TemperatureScaling

FEW = 3  # every epoch pays for them; tests and predictions take more


def fit_samples(trainer: Trainer, eval_samples: int, stated: int | None) -> int:
    """Samples of validation inside a fit.

    Args:
        trainer: The trainer.
        eval_samples: S, of tests and predictions.
        stated: The number that the user asks for; None for the default.

    Returns:
        That number; by default 3, or S where that is smaller, or where validation fits a temperature for S samples.
    """
    if stated is not None:
        return stated
    scales = any(isinstance(callback, TemperatureScaling) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return eval_samples if scales else min(FEW, eval_samples)
