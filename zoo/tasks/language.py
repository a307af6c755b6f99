"""Language modelling: cross-entropy of the next token at every position.

loss = -mean_{i,t} log p(y_it | x_i,≤t, θ)        bits = nats / log 2        perplexity = exp(nats)
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_bayes.curvature import Likelihood, Softmax
from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.metrics import Accuracy, ExpectedCalibrationError, NegativeLogLikelihood
from lightning_bayes.predictive import combine
from lightning_bayes.zoo.tasks.base import SupervisedTask, split_batch


@final
class BayesLanguageModel(SupervisedTask):
    """An ordinary language model. Any callback of this package makes it Bayesian.

    Batches are tokens ``[batch, L]`` and next tokens ``[batch, T]``. The task logs ``train/loss``, ``val/loss`` and, under
    ``val/`` and ``test/``, the per-token metrics ``cls/NLL`` (nats), ``lm/bits``, ``lm/perplexity``, ``cls/Acc`` and
    ``cal/ECE``. Under a posterior they use the probabilities averaged over samples; ``test_mean/...`` are the metrics of the
    posterior mean.

    Args:
        model: Network from tokens ``[batch, L]`` to logits ``[batch, V, T]`` of the last T ≤ L next tokens.
        vocabulary: Number of tokens V, at least 2.
        optimizer: Called with the network's parameters.
        lr_scheduler: Called with the optimizer, stepped once per epoch; None keeps the learning rate constant.

    Raises:
        HyperparameterError: If the vocabulary has fewer than two tokens.
    """

    lightning_bayes_link: ClassVar[str] = "softmax"
    lightning_bayes_likelihood: ClassVar[Likelihood] = Softmax()

    def __init__(
        self,
        model: nn.Module,
        vocabulary: int,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        if vocabulary < 2:
            raise HyperparameterError(
                f"BayesLanguageModel got vocabulary={vocabulary}, but needs at least 2, with one logit per token."
            )
        super().__init__(model, optimizer, lr_scheduler, _metrics(vocabulary, "val/"), _metrics(vocabulary, "test/"))
        self.test_mean_metrics = _metrics(vocabulary, "test_mean/")
        self.vocabulary = vocabulary

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean cross-entropy over the tokens of the batch, a scalar in nats per token."""
        inputs, targets = self._checked(batch)
        loss = F.cross_entropy(self(inputs), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Update the validation metrics. Returns ``outputs``, the logits ``[samples, batch, V, T]``, and ``targets``."""
        inputs, targets = self._checked(batch)
        outputs = self.sampled_forward(inputs)
        log_probs = combine(outputs, "softmax")
        self.log("val/loss", F.nll_loss(log_probs, targets), prog_bar=True, batch_size=len(targets), sync_dist=True)
        self.val_metrics.update(*by_token(log_probs.exp(), targets))
        return {"outputs": outputs, "targets": targets}

    def on_test_epoch_start(self) -> None:
        """Reset the test metrics, including the metrics of the posterior mean."""
        super().on_test_epoch_start()
        self.test_mean_metrics.reset()

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Update the test metrics. Returns ``outputs``, the logits ``[samples, batch, V, T]``, and ``targets``."""
        inputs, targets = self._checked(batch)
        outputs = self.sampled_forward(inputs)
        self.test_metrics.update(*by_token(combine(outputs, "softmax").exp(), targets))
        if self.mean_forward is not None:
            self.test_mean_metrics.update(*by_token(self.mean_forward(inputs).softmax(1), targets))
        return {"outputs": outputs, "targets": targets}

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        super().on_test_epoch_end()
        if self.mean_forward is not None:
            self.log_metrics(self.test_mean_metrics)

    def log_metrics(self, metrics: MetricCollection) -> None:
        """Log metrics, and the NLL as bits and perplexity."""
        values = metrics.compute()
        prefix = metrics.prefix
        nats = values[f"{prefix}cls/NLL"]
        values |= {f"{prefix}lm/bits": nats / math.log(2), f"{prefix}lm/perplexity": nats.exp()}
        self.log_dict(values, sync_dist=True)

    def _checked(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = split_batch(batch)
        if inputs.dim() != 2 or targets.dim() != 2 or inputs.is_floating_point() or targets.is_floating_point():
            raise ShapeError(
                f"Expected integer tokens and next tokens of shape [batch, length], but got {list(inputs.shape)} and "
                f"{list(targets.shape)} of dtype {inputs.dtype} and {targets.dtype}."
            )
        largest = int(max(inputs.max(), targets.max()))
        if largest >= self.vocabulary:
            raise HyperparameterError(
                f"Found token {largest}, but vocabulary={self.vocabulary} allows 0 to {self.vocabulary - 1}. Set the "
                "vocabulary of task and model to the number of tokens, which is len(data.alphabet) for TextDataModule."
            )
        return inputs, targets


def by_token(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten ``[batch, V, T]`` and ``[batch, T]`` to one example per token, ``[batch · T, V]`` and ``[batch · T]``."""
    return probs.movedim(1, -1).flatten(0, 1), targets.flatten()


def _metrics(vocabulary: int, prefix: str) -> MetricCollection:
    metrics = {
        "cls/NLL": NegativeLogLikelihood(),
        "cls/Acc": Accuracy(vocabulary),
        "cal/ECE": ExpectedCalibrationError(),
    }
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)  # type: ignore[arg-type]
