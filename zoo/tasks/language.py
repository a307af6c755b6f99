"""Language modelling: the cross-entropy of every next character or token.

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
    """An ordinary language model, which any callback of this package makes Bayesian.

    It logs ``train/loss``, ``val/loss`` and ``{val,test}/``: ``cls/NLL`` in nats per token, ``lm/bits``, ``lm/perplexity``,
    ``cls/Acc`` and ``cal/ECE``, all over single tokens. Under a posterior these are of the probabilities averaged over
    samples; ``test_mean/...`` has those of the posterior mean.

    Args:
        model: Network from tokens ``[batch, L]`` to logits ``[batch, V, T]`` of the last T ≤ L next tokens.
        vocabulary: Number of tokens V, at least 2.
        optimizer: Called with the network's parameters.
        lr_scheduler: Called with the optimizer, stepped once per epoch; None keeps the learning rate.

    Raises:
        HyperparameterError: If the vocabulary has fewer than two tokens.

    Example:
        >>> from lightning_bayes.zoo.models import CharRNN
        >>> task = BayesLanguageModel(CharRNN(vocabulary=30, hidden=8), vocabulary=30)
        >>> task(torch.zeros(4, 7, dtype=torch.long)).shape
        torch.Size([4, 30, 7])
    """

    link: ClassVar[str] = "softmax"
    likelihood: ClassVar[Likelihood] = Softmax()

    def __init__(
        self,
        model: nn.Module,
        vocabulary: int,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        if vocabulary < 2:
            raise HyperparameterError(
                f"BayesLanguageModel got vocabulary={vocabulary}, but needs at least 2: one logit for each token."
            )
        super().__init__(model, optimizer, lr_scheduler, _metrics(vocabulary, "val/"), _metrics(vocabulary, "test/"))
        self.test_mean_metrics = _metrics(vocabulary, "test_mean/")
        self.vocabulary = vocabulary

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean cross-entropy over the tokens of the batch.

        Args:
            batch: Tokens and next tokens.
            batch_idx: Position in the epoch.

        Returns:
            The loss, a scalar in nats per token.
        """
        inputs, targets = self._checked(batch)
        loss = F.cross_entropy(self(inputs), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Update the validation metrics.

        Args:
            batch: Tokens and next tokens.
            batch_idx: Position in the epoch.

        Returns:
            ``outputs``, the logits ``[samples, batch, V, T]``, and ``targets``.
        """
        inputs, targets = self._checked(batch)
        outputs = self.sampled_forward(inputs)
        log_probs = combine(outputs, "softmax")
        self.log("val/loss", F.nll_loss(log_probs, targets), prog_bar=True, batch_size=len(targets), sync_dist=True)
        self.val_metrics.update(*by_token(log_probs.exp(), targets))
        return {"outputs": outputs, "targets": targets}

    def on_test_epoch_start(self) -> None:
        """Discard the state of an interrupted test."""
        super().on_test_epoch_start()
        self.test_mean_metrics.reset()

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Update the test metrics.

        Args:
            batch: Tokens and next tokens.
            batch_idx: Position in the epoch.

        Returns:
            As `validation_step`.
        """
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
        """Log metrics, and the NLL in other units.

        Args:
            metrics: As in `SupervisedTask.log_metrics`, one of them the NLL.
        """
        values = metrics.compute()
        prefix, nats = next((name.removesuffix("cls/NLL"), value) for name, value in values.items() if "NLL" in name)
        more = {f"{prefix}lm/bits": nats / math.log(2), f"{prefix}lm/perplexity": nats.exp()}
        self.log_dict({**values, **more}, sync_dist=True)

    def _checked(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = split_batch(batch)
        if inputs.dim() != 2 or targets.dim() != 2 or inputs.is_floating_point() or targets.is_floating_point():
            raise ShapeError(
                f"A batch has tokens {list(inputs.shape)} and next tokens {list(targets.shape)}; expected whole numbers "
                "[batch, length] each."
            )
        largest = int(max(inputs.max(), targets.max()))
        if largest >= self.vocabulary:
            raise HyperparameterError(
                f"Found the token {largest}, but vocabulary={self.vocabulary} allows 0 to {self.vocabulary - 1}. Set the "
                "vocabulary of task and model to the number of tokens; for TextDataModule it is len(data.alphabet)."
            )
        return inputs, targets


def by_token(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Every token as an example.

    Args:
        probs: ``[batch, V, T]``.
        targets: ``[batch, T]``.

    Returns:
        ``[batch · T, V]`` and ``[batch · T]``.
    """
    return probs.movedim(1, -1).flatten(0, 1), targets.flatten()


def _metrics(vocabulary: int, prefix: str) -> MetricCollection:
    metrics = {
        "cls/NLL": NegativeLogLikelihood(),
        "cls/Acc": Accuracy(vocabulary),
        "cal/ECE": ExpectedCalibrationError(),
    }
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)  # type: ignore[arg-type]
