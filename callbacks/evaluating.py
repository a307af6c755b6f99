"""Which posterior a callback has at hand when it evaluates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.callbacks.averaging import AveragingCallback
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.posteriors import AbstractPosterior, callback_state, posterior_from_checkpoint
from lightning_bayes.predictive import Link, PosteriorSamples


class EvaluatingCallback(AveragingCallback, ABC):
    """Averages validation, test and prediction over posterior samples.

    During a fit the posterior is the optimizer's, afterwards the fit's last one or that of the checkpoint Lightning loads.

    Args:
        eval_samples: S; 0 evaluates at the mean.
        link: How outputs become predictions; None asks the module, then the training loss.
        seed: Seed of the weight samples.
    """

    def __init__(self, eval_samples: int, link: Link | None, seed: int) -> None:
        super().__init__(link, seed)
        self.eval_samples = eval_samples
        self.optimizer: MeanFieldOptimizer | None = None
        self._kept: AbstractPosterior | None = None  # of the last fit, or of a checkpoint
        self._why_none = "no posterior was trained or loaded. Pass ckpt_path=..."

    @property
    @abstractmethod
    def optimizer_class(self) -> type[MeanFieldOptimizer]:
        """The optimizer that takes the place of the user's."""

    def _averages(self) -> bool:
        return self.eval_samples > 0 and self.optimizer_class.noisy

    def take_posterior(self, checkpoint: dict[str, Any]) -> None:
        """Take the posterior of a loaded checkpoint for evaluation.

        Args:
            checkpoint: Contents of a Lightning checkpoint.
        """
        self.loss_link = callback_state(checkpoint).get("link")
        try:
            self._kept = posterior_from_checkpoint(checkpoint)
        except PosteriorError as error:
            self._kept, self._why_none = None, str(error)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the posterior for tests and predictions in this process.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self.optimizer is not None and self.optimizer.num_updates and self._averages():
            self._kept = self.optimizer.posterior().to("cpu")

    def _samples_now(self, trainer: Trainer, pl_module: LightningModule) -> PosteriorSamples | None:
        posterior = self._posterior_now(trainer, pl_module) if self._averages() else None
        if posterior is None:
            return None
        return PosteriorSamples(posterior.to(pl_module.device), self.eval_samples, self.seed)

    def _posterior_now(self, trainer: Trainer, pl_module: LightningModule) -> AbstractPosterior | None:
        if trainer.state.fn == "fit":
            started = self.optimizer is not None and self.optimizer.num_updates > 0
            return self.optimizer.posterior() if self.optimizer is not None and started else None
        if self._kept is not None and _is_mean(pl_module.state_dict(), self._kept):
            return self._kept
        why = self._why_none if self._kept is None else "they are not the mean of its posterior. Pass ckpt_path=..."
        rank_zero_warn(f"{type(self).__name__} evaluates at the weights as they are: {why}")
        return None


def _is_mean(weights: dict[str, torch.Tensor], posterior: AbstractPosterior) -> bool:
    return all(n in weights and torch.equal(weights[n].cpu(), mean.cpu()) for n, mean in posterior.mean.items())
