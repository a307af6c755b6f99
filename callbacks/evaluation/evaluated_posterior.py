"""The posterior that an evaluation samples from."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import VariationalOptimizer
from lightning_bayes.optim.readout import posterior_from_checkpoint
from lightning_bayes.posteriors import AbstractPosterior

FEW_SAMPLES: Final = 3  # for validation in a fit, which runs in every epoch


@final
class EvaluatedPosterior:
    """The optimizer's posterior during a fit; otherwise the posterior of the last fit or of the loaded checkpoint."""

    def __init__(self) -> None:
        self._posterior: AbstractPosterior | None = None
        self._reason = "no posterior was trained or loaded. Pass ckpt_path=..."

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load the posterior from the contents of a Lightning checkpoint."""
        try:
            self._posterior = posterior_from_checkpoint(checkpoint)
        except PosteriorError as error:
            self._posterior, self._reason = None, str(error)

    def keep(self, optimizer: VariationalOptimizer) -> None:
        """Copy the posterior of an optimizer at the end of its fit."""
        self._posterior = optimizer.posterior().to("cpu")

    def find(
        self, trainer: Trainer, module: LightningModule, optimizer: VariationalOptimizer | None, callback: str
    ) -> AbstractPosterior | None:
        """The posterior whose mean equals the module's weights; None without one, with a warning outside of a fit."""
        if trainer.state.fn == "fit":
            return optimizer.posterior() if optimizer is not None and optimizer.num_updates > 0 else None
        if self._posterior is not None and is_mean_of(self._posterior, module.state_dict()):
            return self._posterior
        reason = (
            self._reason if self._posterior is None else "they are not the mean of its posterior. Pass ckpt_path=..."
        )
        rank_zero_warn(f"{callback} evaluates at the module's current weights: {reason}")
        return None


def is_mean_of(posterior: AbstractPosterior, weights: dict[str, torch.Tensor]) -> bool:
    """Whether weights, by name, equal the mean of a posterior bit by bit."""
    return all(n in weights and torch.equal(weights[n].cpu(), mean.cpu()) for n, mean in posterior.mean.items())


def sample_count(trainer: Trainer, eval_samples: int, stated: int | None) -> int:
    """The number of weight samples of the current evaluation."""
    if trainer.state.fn != "fit" or trainer.training:
        return eval_samples
    return min(FEW_SAMPLES, eval_samples) if stated is None else stated
