"""How many forwards validation inside a fit costs."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_bayes.callbacks.temperature import TemperatureScaling

FEW = 3  # every epoch pays for them; tests and predictions take more


def sample_count(trainer: Trainer, eval_samples: int, stated: int | None) -> int:
    """Samples of the evaluation that runs now.

    Args:
        trainer: The trainer.
        eval_samples: S, of tests and predictions, and of the width that a fit ends with.
        stated: The number for validation inside a fit; None for the default.

    Returns:
        S outside of validation inside a fit. There the stated number; by default 3, or S where that is smaller, or where
        validation fits a temperature for S samples.
    """
    if trainer.state.fn != "fit" or trainer.training:
        return eval_samples
    if stated is not None:
        return stated
    scales = any(isinstance(callback, TemperatureScaling) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return eval_samples if scales else min(FEW, eval_samples)
