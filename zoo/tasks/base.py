"""Base class of the supervised tasks: a network, the user's optimizer, and metrics over an epoch."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, final

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI, LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torchmetrics import MetricCollection

from lightning_bayes.errors import ShapeError


@final
class CosineToEnd(CosineAnnealingLR):
    """Cosine annealing of the learning rate from its start to `eta_min` over ``max_epochs`` of the fit.

    A task of this package sets the number of epochs; elsewhere it is 1.

    Args:
        optimizer: The optimizer.
        eta_min: The learning rate at the end.
    """

    def __init__(self, optimizer: Optimizer, eta_min: float = 0.0) -> None:
        super().__init__(optimizer, T_max=1, eta_min=eta_min)


class SupervisedTask(LightningModule, abc.ABC):
    """Base class of tasks with ``(inputs, targets)`` batches.

    A subclass computes the loss in ``training_step`` and updates ``val_metrics`` and ``test_metrics``. Arguments are not
    saved as hyperparameters, so that checkpoints contain only tensors and plain values. Pass the arguments again to
    ``load_from_checkpoint(path, model=...)``.

    Args:
        model: The network.
        optimizer: Called with the network's parameters.
        lr_scheduler: Called with the optimizer; None keeps the learning rate constant.
        val_metrics: Updated by ``validation_step``.
        test_metrics: Updated by ``test_step``.
    """

    # Output at the posterior mean. Evaluation callbacks set it while ``forward`` averages over posterior samples.
    mean_forward: Callable[[Any], Tensor] | None = None
    averages: bool = False  # whether ``sampled_forward`` returns several samples; set by evaluation callbacks

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
        """The loss: the mean negative log-likelihood per example, in nats."""

    def forward(self, batch: Any) -> Tensor:
        """Apply the network to the inputs, or to a batch: a tuple or list whose first element is the inputs."""
        # Lightning's predict_step passes whole batches, so trainer.predict accepts training and test loaders.
        outputs: Tensor = self.model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        return outputs

    def sampled_forward(self, batch: Any) -> Tensor:
        """Outputs ``[samples, batch, ...]`` under each posterior sample; a point estimate has one sample."""
        # While an evaluation callback is active, it replaces this method and forward.
        outputs: Tensor = self(batch)
        return outputs.unsqueeze(0)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The user's optimizer and scheduler, including the ``monitor`` of LightningCLI's ``ReduceLROnPlateau``."""
        optimizer = self.optimizer(self.model.parameters())
        scheduler = self.lr_scheduler(optimizer) if self.lr_scheduler is not None else None
        if isinstance(scheduler, CosineToEnd):
            scheduler.T_max = max(self.trainer.max_epochs or 1, 1)
        configured: OptimizerLRScheduler = LightningCLI.configure_optimizers(self, optimizer, scheduler)
        return configured

    def on_validation_epoch_start(self) -> None:
        """Reset the validation metrics, which an interrupted validation may have left non-empty."""
        self.val_metrics.reset()

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        self.log_metrics(self.val_metrics)

    def on_test_epoch_start(self) -> None:
        """Reset the test metrics, which an interrupted test may have left non-empty."""
        self.test_metrics.reset()

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self.log_metrics(self.test_metrics)

    def log_metrics(self, metrics: MetricCollection) -> None:
        """Log metrics over all batches since the last reset, on all processes."""
        # compute() reduces over all processes. sync_dist averages equal values and avoids Lightning's warning.
        self.log_dict(metrics.compute(), sync_dist=True)


def split_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """Split a batch into inputs and targets."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        length = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise ShapeError(
            f"A batch must be a pair (inputs, targets), but got a {type(batch).__name__}{length}. "
            "Return (input, target) from the dataset."
        )
    return batch[0], batch[1]
