"""The number of weight samples of an evaluation."""

from __future__ import annotations

from lightning.pytorch import Trainer

FEW = 3  # for validation in a fit, which runs in every epoch


def sample_count(trainer: Trainer, eval_samples: int, stated: int | None) -> int:
    """The number of weight samples of the current evaluation."""
    if trainer.state.fn != "fit" or trainer.training:
        return eval_samples
    if stated is not None:
        return stated
    return min(FEW, eval_samples)
