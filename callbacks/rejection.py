"""Rejection with a risk guarantee in a test, with a threshold from the validation set."""

from __future__ import annotations

from typing import Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.callbacks.trainer.loaders import ValidationSet
from lightning_bayes.callbacks.trainer.step_outputs import StepOutputs, step_outputs
from lightning_bayes.errors import DataError, HyperparameterError, UnsupportedTrainingError
from lightning_bayes.predictive import Rejector, SampledModule


@final
class RejectorCallback(Callback):
    """Tests a classifier that answers only if it is confident enough (see `lightning_bayes.predictive.Rejector`).

    Before a test, the callback evaluates the validation set and fits a threshold: predictions whose largest probability
    exceeds it are wrong for at most a fraction `risk` of new answers, with the given confidence. The test logs
    ``test/reject/threshold``, ``test/reject/coverage`` (fraction of the test set that is answered) and ``test/reject/error``
    (fraction of the answers that are wrong). The guarantee holds only if the validation set was used for nothing else, such
    as to choose an epoch, a temperature, a width or a prior; a fit with this callback chooses no temperature by default.

    The module's ``test_step`` must return ``{"outputs": logits, "targets": classes}``, and the module must have a
    ``sampled_forward``; `lightning_bayes.zoo.BayesClassifier` does both. The validation set's logits are held in memory.

    Args:
        risk: r*, tolerated fraction of errors among the answers, between 0 and 1.
        confidence: 1 - δ, probability over validation sets that the risk is at most `risk`.

    Raises:
        HyperparameterError: If one of them is not between 0 and 1.

    Attributes:
        rejector: The rejector of the last test; None before a test, and if no threshold satisfies the risk.
    """

    @checked
    def __init__(self, risk: float = 0.05, confidence: float = 0.95) -> None:
        if not (0 < risk < 1 and 0 < confidence < 1):
            raise HyperparameterError(f"risk={risk!r} and confidence={confidence!r} must lie between 0 and 1.")
        self.risk, self.confidence = risk, confidence
        self.rejector: Rejector | None = None
        self._validation = ValidationSet(type(self).__name__, "threshold", "lightning_bayes.predictive.Rejector.fit")
        self._counts = torch.zeros(3, dtype=torch.float64)  # rows, answers, wrong answers

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loaders, because a test without a data module has none."""
        self._validation.keep(trainer)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit the threshold.

        Raises:
            UnsupportedTrainingError: If the module has no ``sampled_forward``, there is no validation set, or there are
                several processes.
        """
        if trainer.world_size > 1:
            raise UnsupportedTrainingError(
                f"RejectorCallback counts the errors of one process, but this trainer has {trainer.world_size}. Test with "
                "Trainer(devices=1)."
            )
        if not isinstance(pl_module, SampledModule):
            raise UnsupportedTrainingError(
                f"RejectorCallback calls the module's sampled_forward, but {type(pl_module).__name__} has none (see "
                "lightning_bayes.predictive.SampledModule). Use lightning_bayes.zoo.BayesClassifier, or call "
                "lightning_bayes.predictive.Rejector.fit yourself."
            )
        self._counts.zero_()
        loader = self._validation.loader(trainer)
        validation = self._validation.outputs(trainer, pl_module, pl_module.sampled_forward, loader)
        try:
            self.rejector = Rejector.fit(_probs(validation), validation.targets, self.risk, self.confidence)
        except DataError as error:
            self.rejector = None
            rank_zero_warn(f"The test continues without rejection. {error}")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count answers and errors of the first test loader."""
        if self.rejector is None or dataloader_idx != 0:
            return
        step = step_outputs(pl_module, "test_step", outputs)
        probs = _probs(step)
        is_answer = self.rejector.accepts(probs)
        is_wrong = is_answer & (probs.argmax(1) != step.targets)
        self._counts += torch.tensor([len(probs), int(is_answer.sum()), int(is_wrong.sum())])

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log threshold, coverage and error."""
        if self.rejector is None:
            return
        rows, answers, wrong = self._counts.tolist()
        values = {"threshold": self.rejector.threshold, "coverage": answers / rows, "error": wrong / max(answers, 1)}
        pl_module.log_dict({f"test/reject/{name}": value for name, value in values.items()})


def _probs(step: StepOutputs) -> Tensor:
    return step.outputs.double().softmax(-1).mean(0)
