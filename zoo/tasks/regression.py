"""Regression with a Gaussian likelihood of fixed noise.

    loss = -mean_i log N(y_i | f(x_i, θ), σ²) = mean_i (y_i - f(x_i, θ))² / (2σ²) + log σ + ½ log 2π

The factor 1 / (2σ²) stays in: a posterior is only right if the loss is the negative log-likelihood, and not merely
proportional to it.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, final

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError, ShapeError
from lightning_bayes.metrics import regression_metrics
from lightning_bayes.zoo.tasks.base import SupervisedTask, split_batch


@final
class BayesRegressor(SupervisedTask):
    """An ordinary regressor of one number, ready for any callback of this package; without one it trains as it stands.

    Logged are ``train/loss``, ``val/loss`` and ``{val,test}/reg/{RMSE,NLL}``, in the units of the targets. The
    predictive variance that enters NLL is σ² plus the variance of f over posterior samples (none without a posterior).

    Args:
        model: Network from inputs to means, ``[batch, 1]`` or ``[batch]``.
        optimizer: Called with the network's parameters; Adam with its default learning rate of 1e-3 if not given.
        lr_scheduler: Called with the optimizer, stepped once per epoch; None keeps the learning rate.
        noise_std: Standard deviation σ of the noise, in the units of the targets that the network sees, usually
            standardised; 1 then is the noise of knowing nothing.

    Raises:
        HyperparameterError: If ``noise_std`` is not a positive number.

    Example:
        >>> task = BayesRegressor(nn.Linear(4, 1), noise_std=0.1)
        >>> task((torch.zeros(2, 4), torch.zeros(2))).shape  # a whole batch, as predict_step passes it
        torch.Size([2, 1])
    """

    link: ClassVar[str] = "identity"  # callbacks read how an output becomes a prediction

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerCallable = torch.optim.Adam,
        lr_scheduler: LRSchedulerCallable | None = None,
        noise_std: float = 1.0,
    ) -> None:
        if not (math.isfinite(noise_std) and noise_std > 0):
            raise HyperparameterError(
                f"BayesRegressor got noise_std={noise_std}, but a standard deviation must be positive and finite."
            )
        super().__init__(
            model, optimizer, lr_scheduler, regression_metrics(prefix="val/"), regression_metrics(prefix="test/")
        )
        self.noise_std = noise_std

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean negative log-likelihood of the batch.

        Args:
            batch: Inputs, and targets ``[batch]`` or ``[batch, 1]``.
            batch_idx: Position in the epoch.

        Returns:
            The loss, a scalar in nats.
        """
        inputs, targets = split_batch(batch)
        loss = self._nll(*self._columns(self(inputs), targets, len(inputs)))
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Feed the validation metrics.

        Args:
            batch: Inputs, and targets ``[batch]`` or ``[batch, 1]``.
            batch_idx: Position in the epoch.
        """
        mean, variance, targets = self._predictive(batch)
        loss = self._nll(mean, targets)
        self.log("val/loss", loss, prog_bar=True, batch_size=len(targets), sync_dist=True)
        self.val_metrics.update(mean, variance, targets)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Feed the test metrics.

        Args:
            batch: Inputs, and targets ``[batch]`` or ``[batch, 1]``.
            batch_idx: Position in the epoch.
        """
        self.test_metrics.update(*self._predictive(batch))

    def _predictive(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of the prediction, and the targets; each ``[batch]``."""
        inputs, targets = split_batch(batch)
        each = [self._columns(outputs, targets, len(inputs)) for outputs in self.sampled_forward(inputs)]
        samples = torch.stack([mean for mean, _ in each])
        return samples.mean(0), samples.var(0, correction=0) + self.noise_std**2, each[0][1]

    def _columns(self, mean: Tensor, targets: Tensor, num_examples: int) -> tuple[Tensor, Tensor]:
        self._check_column("The output of " + type(self.model).__name__, mean, num_examples)
        self._check_column("The target", targets, num_examples)
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32)).flatten()  # 16-bit means in 32 bits
        return mean, targets.to(mean.dtype).flatten()

    def _nll(self, mean: Tensor, targets: Tensor) -> Tensor:
        squared = ((targets - mean) / self.noise_std).square().mean()
        return 0.5 * squared + math.log(self.noise_std) + 0.5 * math.log(2 * math.pi)

    @staticmethod
    def _check_column(what: str, values: Tensor, num_examples: int) -> None:
        # [batch, 1] - [batch] would broadcast to [batch, batch] and train on nonsense.
        if values.shape not in {(num_examples,), (num_examples, 1)}:
            raise ShapeError(
                f"{what} has shape {list(values.shape)}, but regression of one number from {num_examples} inputs needs "
                f"[{num_examples}] or [{num_examples}, 1]."
            )
