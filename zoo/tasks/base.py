"""The base of the supervised tasks: a network, the user's optimizer, metrics over an epoch."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_bayes.errors import ShapeError


class SupervisedTask(LightningModule, abc.ABC):
    """Base of the tasks on ``(inputs, targets)`` batches.

    A subclass computes the loss in ``training_step`` and updates ``val_metrics`` and ``test_metrics``. Arguments are not
    stored as hyperparameters, so that checkpoints hold tensors and plain values only; pass them again to
    ``load_from_checkpoint(path, model=...)``.

    Args:
        model: The network.
        optimizer: Called with the network's parameters.
        lr_scheduler: Called with the optimizer; None keeps the learning rate.
        val_metrics: Fed by ``validation_step``.
        test_metrics: Fed by ``test_step``.
    """

    # The output at the posterior mean. Evaluation callbacks set it while ``forward`` averages over posterior samples.
    mean_forward: Callable[[Any], Tensor] | None = None
    averages: bool = False  # whether ``sampled_forward`` gives several samples; evaluation callbacks set it

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        val_metrics: MetricCollection,
        test_metrics: MetricCollection,
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.val_metrics = val_metrics
        self.test_metrics = test_metrics

    @abc.abstractmethod
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss: the mean over the batch of the negative log-likelihood per example, in nats."""

    def forward(self, batch: Any) -> Tensor:
        """The network's output.

        Lightning's ``predict_step`` passes whole batches, targets included. They are dropped here, so that
        ``trainer.predict`` works on the loaders of training and test.

        Args:
            batch: The inputs, or a tuple or list that begins with them.

        Returns:
            The output of the network.
        """
        outputs: Tensor = self.model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        return outputs

    def sampled_forward(self, batch: Any) -> Tensor:
        """The network's outputs under each posterior sample.

        A point estimate gives one sample. Evaluation callbacks replace this method, like ``forward``, while they are active.
        It is for steps that need more than the average over samples.

        Args:
            batch: As in ``forward``.

        Returns:
            Outputs, ``[samples, batch, ...]``.
        """
        outputs: Tensor = self(batch)
        return outputs.unsqueeze(0)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The user's optimizer and schedule, on the network's parameters.

        Returns:
            Lightning's configuration, with the ``monitor`` of a ``ReduceLROnPlateau`` of ``lightning.pytorch.cli``.
        """
        optimizer = self.optimizer(self.model.parameters())
        scheduler = self.lr_scheduler(optimizer) if self.lr_scheduler is not None else None
        configured: OptimizerLRScheduler = LightningCLI.configure_optimizers(self, optimizer, scheduler)
        return configured

    def on_validation_epoch_start(self) -> None:
        """Discard the state of an interrupted validation."""
        self.val_metrics.reset()

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        self.log_metrics(self.val_metrics)

    def on_test_epoch_start(self) -> None:
        """Discard the state of an interrupted test."""
        self.test_metrics.reset()

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self.log_metrics(self.test_metrics)

    def log_metrics(self, metrics: MetricCollection) -> None:
        """Log metrics over all batches since their last reset, on all processes.

        Args:
            metrics: Metrics with scalar values; their keys, prefix included, are the logged names.
        """
        # compute() has reduced over all processes; sync_dist averages equal values and avoids Lightning's warning.
        self.log_dict(metrics.compute(), sync_dist=True)


def split_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a batch.

    Args:
        batch: A pair of tensors.

    Returns:
        The inputs and the targets.

    Raises:
        ShapeError: If the batch is not a pair.

    Example:
        >>> split_batch([1, 2, 3])
        Traceback (most recent call last):
        ...
        lightning_bayes.errors.ShapeError: A batch must be a pair (inputs, targets) but is a list of length 3. ...
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        length = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise ShapeError(
            f"A batch must be a pair (inputs, targets) but is a {type(batch).__name__}{length}. "
            "Let the dataset return (input, target)."
        )
    return batch[0], batch[1]
