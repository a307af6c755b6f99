"""Evaluation under samples: averages validation, test and prediction, with the link of the module or of its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, final, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_bayes.callbacks.checks import refuse_other_package
from lightning_bayes.callbacks.loss_link import link_of_loss
from lightning_bayes.callbacks.recalibration import recalibrated
from lightning_bayes.callbacks.sampled_forward import SampledForward
from lightning_bayes.callbacks.spread import spread
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.predictive import Link, Samples, check_link


@runtime_checkable
class FinishesSamples(Protocol):
    """A callback that changes the samples of evaluations outside of a fit, such as `PosteriorScale`."""

    def finished_samples(self, trainer: Trainer, module: LightningModule, samples: Samples, link: Link) -> Samples:
        """Samples to evaluate under instead of `samples`."""
        ...


@final
class PosteriorEvaluation:
    """Averages a module's predictions over samples between `start` and `stop`.

    Args:
        link: How outputs become predictions; None reads it from the module, then from the training loss.
        opt_out_hint: How to evaluate without samples, for messages.

    Attributes:
        loss_link: The link of the training loss; None if unknown.
        has_seen_loss: Whether `observe_loss` was called in this fit.
    """

    def __init__(self, link: Link | None, opt_out_hint: str) -> None:
        if link is not None:
            check_link(link)
        self.link, self.opt_out_hint = link, opt_out_hint
        self.loss_link: Link | None = None
        self.has_seen_loss = False
        self._forward: SampledForward | None = None

    def observe_loss(self, loss: torch.Tensor) -> None:
        """Read the link from the first loss of a fit. The loss must have its graph."""
        if not self.has_seen_loss:
            self.has_seen_loss, self.loss_link = True, link_of_loss(loss)

    def link_of(self, module: LightningModule) -> Link | None:
        """The link of a module: the argument, else the module's attribute ``link``, else the link of the loss.

        Returns:
            The link; None if unknown.
        """
        link: Link | None = self.link or getattr(module, "link", None) or self.loss_link
        return link

    def start(self, trainer: Trainer, module: LightningModule, samples: Samples, *, predict: bool) -> None:
        """Replace the module's forward by the average over samples, and in prediction also its ``predict_step``."""
        require_single_evaluation(trainer)
        link = self.link_of(module) or "softmax"
        if trainer.state.fn != "fit":
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, FinishesSamples):
                    samples = callback.finished_samples(trainer, module, samples, link)
        self._forward = SampledForward(
            module,
            spread(trainer, recalibrated(trainer, module, samples)),
            link,
            opt_out_hint=self.opt_out_hint,
            lenient=trainer.state.fn == "fit",
        )
        self._forward.start(predict)

    def stop(self, warn: bool = True) -> None:
        """Restore the module's forward, and warn by default if nothing was averaged."""
        if self._forward is not None:
            self._forward.stop(warn)
            self._forward = None


class EvaluationCallback(Callback, ABC):
    """Callback hooks that evaluate a module under samples.

    Args:
        link: How outputs become predictions; None reads it from the module, then from the training loss.
    """

    opt_out_hint = "set eval_samples=0"

    def __init__(self, link: Link | None) -> None:
        self.evaluation = PosteriorEvaluation(link, self.opt_out_hint)

    @property
    def link(self) -> Link | None:
        """The link that was passed as an argument."""
        return self.evaluation.link

    @abstractmethod
    def find_samples(self, trainer: Trainer, pl_module: LightningModule) -> Samples | None:
        """Find the samples to average over.

        Returns:
            The samples; None to leave the module alone.
        """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse trainers of the package pytorch_lightning."""
        refuse_other_package(trainer)

    def undo(self) -> None:
        """Undo all changes of the trainer and the module."""
        self.evaluation.stop(warn=False)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Read the link from the first loss of a fit."""
        self.evaluation.observe_loss(loss)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start averaging."""
        if not trainer.sanity_checking:
            self._start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop averaging."""
        self.evaluation.stop()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start averaging."""
        self._start(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop averaging."""
        self.evaluation.stop()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start averaging."""
        self._start(trainer, pl_module, predict=True)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop averaging."""
        self.evaluation.stop()

    def _start(self, trainer: Trainer, pl_module: LightningModule, predict: bool = False) -> None:
        samples = self.find_samples(trainer, pl_module)
        if samples is not None:
            self.evaluation.start(trainer, pl_module, samples, predict=predict)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo everything at the end of a run."""
        self.undo()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo everything: after an exception, Lightning does not call the `teardown` of callbacks."""
        self.undo()


def require_single_evaluation(trainer: Trainer) -> None:
    """Require one callback that evaluates under samples: with two, one would average the other's averages.

    Raises:
        UnsupportedTrainingError: If there are several.
    """
    names = [type(c).__name__ for c in trainer.callbacks if isinstance(c, EvaluationCallback)]  # type: ignore[attr-defined]
    if len(names) > 1:
        raise UnsupportedTrainingError(f"{' and '.join(names)} each average predictions. Keep one of them.")
