"""The posterior that an evaluation samples from."""

from __future__ import annotations

from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.callbacks.model_parallel import gathered_weights
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.optim.readout import posterior_from_checkpoint
from lightning_bayes.posteriors import AbstractPosterior


@final
class EvaluatedPosterior:
    """The optimizer's posterior during a fit; afterwards that of the last fit, or of the checkpoint that was loaded."""

    def __init__(self) -> None:
        self._kept: AbstractPosterior | None = None
        self._why_none = "no posterior was trained or loaded. Pass ckpt_path=..."

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take the posterior of a checkpoint.

        Args:
            checkpoint: Contents of a Lightning checkpoint.
        """
        try:
            self._kept = posterior_from_checkpoint(checkpoint)
        except PosteriorError as error:
            self._kept, self._why_none = None, str(error)

    def keep(self, optimizer: MeanFieldOptimizer) -> None:
        """Copy the posterior of an optimizer at the end of its fit."""
        self._kept = optimizer.posterior().to("cpu")

    def forget(self) -> None:
        """Forget the posterior: another fit begins."""
        self._kept = None

    def find(
        self, trainer: Trainer, module: LightningModule, optimizer: MeanFieldOptimizer | None, callback: str
    ) -> AbstractPosterior | None:
        """Find the posterior whose mean the module's weights are.

        Args:
            trainer: The trainer.
            module: The module.
            optimizer: The swapped optimizer of the present or last fit.
            callback: Name of the callback's class, for the warning.

        Returns:
            The posterior; None, with a warning outside of a fit, if there is none.
        """
        if trainer.state.fn == "fit":
            return optimizer.posterior() if optimizer is not None and optimizer.num_updates > 0 else None
        if self._kept is not None and is_mean_of(self._kept, gathered_weights(module)):
            return self._kept
        why = self._why_none if self._kept is None else "they are not the mean of its posterior. Pass ckpt_path=..."
        rank_zero_warn(f"{callback} evaluates at the weights as they are: {why}")
        return None


def is_mean_of(posterior: AbstractPosterior, weights: dict[str, torch.Tensor]) -> bool:
    """Whether weights are the mean of a posterior.

    Args:
        posterior: The posterior.
        weights: A module's, by name.

    Returns:
        Whether they have the same bits.
    """
    return all(n in weights and torch.equal(weights[n].cpu(), mean.cpu()) for n, mean in posterior.mean.items())
