"""When a callback evaluates under the posterior, and which posterior it has at hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_bayes.callbacks.evaluation import PosteriorEvaluation
from lightning_bayes.callbacks.loss_link import link_of_loss
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim import MeanFieldOptimizer
from lightning_bayes.posteriors import CALLBACK_KEY, MeanField, posterior_from_checkpoint
from lightning_bayes.predictive import Link, PosteriorSamples, check_link


class EvaluatingCallback(Callback, ABC):
    """Averages validation, test and prediction over posterior samples.

    During a fit the posterior is the optimizer's, afterwards the fit's last one or that of the checkpoint Lightning loads.

    Args:
        eval_samples: S; 0 evaluates at the mean.
        link: How outputs become predictions; None asks the module, then the training loss.
        seed: Seed of the weight samples.
    """

    def __init__(self, eval_samples: int, link: Link | None, seed: int) -> None:
        if link is not None:
            check_link(link)
        self.eval_samples, self.link, self.seed = eval_samples, link, seed
        self.loss_link: Link | None = None  # what the training loss says
        self._asked_loss = False
        self.optimizer: MeanFieldOptimizer | None = None
        self._kept: MeanField | None = None  # of the last fit, or of a checkpoint
        self._why_none = "no posterior was trained or loaded. Pass ckpt_path=..."
        self._evaluation: PosteriorEvaluation | None = None

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
        self.loss_link = checkpoint.get("callbacks", {}).get(CALLBACK_KEY, {}).get("link")
        try:
            self._kept = posterior_from_checkpoint(checkpoint)
        except PosteriorError as error:
            self._kept, self._why_none = None, str(error)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Read from the first loss of a fit how outputs become predictions.

        Args:
            trainer: The trainer.
            pl_module: The module.
            loss: The loss.
        """
        if not self._asked_loss:
            self._asked_loss, self.loss_link = True, link_of_loss(loss)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the posterior for tests and predictions in this process.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if self.optimizer is not None and self.optimizer.num_updates and self._averages():
            self._kept = self.optimizer.posterior().to("cpu")

    def _posterior_now(self, trainer: Trainer, pl_module: LightningModule) -> MeanField | None:
        if trainer.state.fn == "fit":
            started = self.optimizer is not None and self.optimizer.num_updates > 0
            return self.optimizer.posterior() if self.optimizer is not None and started else None
        if self._kept is not None and _is_mean(pl_module.state_dict(), self._kept):
            return self._kept
        why = self._why_none if self._kept is None else "they are not the mean of its posterior. Pass ckpt_path=..."
        rank_zero_warn(f"{type(self).__name__} evaluates at the weights as they are: {why}")
        return None

    def _start_evaluation(self, trainer: Trainer, pl_module: LightningModule, predict: bool = False) -> None:
        if trainer.sanity_checking or not self._averages():
            return
        posterior = self._posterior_now(trainer, pl_module)
        if posterior is None:
            return
        samples = PosteriorSamples(posterior.to(pl_module.device), self.eval_samples, self.seed)
        link = self.link or getattr(pl_module, "link", None) or self.loss_link or "softmax"
        self._evaluation = PosteriorEvaluation(pl_module, samples, link, lenient=trainer.state.fn == "fit")
        self._evaluation.start(predict)

    def stop_evaluation(self, warn: bool = True) -> None:
        """Give the module its own forward back.

        Args:
            warn: Whether to warn if nothing was averaged.
        """
        if self._evaluation is not None:
            self._evaluation.stop(warn)
            self._evaluation = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average over the posterior from here."""
        self._start_evaluation(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to the module's own forward."""
        self.stop_evaluation()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average over the posterior from here."""
        self._start_evaluation(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to the module's own forward."""
        self.stop_evaluation()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average over the posterior from here."""
        self._start_evaluation(trainer, pl_module, predict=True)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to the module's own forward."""
        self.stop_evaluation()


def _is_mean(weights: dict[str, torch.Tensor], posterior: MeanField) -> bool:
    return all(n in weights and torch.equal(weights[n].cpu(), mean.cpu()) for n, mean in posterior.mean.items())
