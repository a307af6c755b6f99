"""Noisy Adam on an unmodified LightningModule."""

from __future__ import annotations

from typing import final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import NoisyAdam, NoisyAdamFisher


@final
class NoisyAdamCallback(VariationalCallback):
    """Trains with Noisy Adam (`lightning_bayes.NoisyAdam`): one backward pass of any layer, at Adam's cost.

    The width of the posterior depends on the batch size, see `optim.diagonal.estimators.batch_square`.
    """

    optimizer_class = NoisyAdam


@final
class NoisyAdamFisherCallback(VariationalCallback):
    """Trains with Noisy Adam on the Fisher diagonal (`lightning_bayes.NoisyAdamFisher`), computed by BackPACK."""

    optimizer_class = NoisyAdamFisher
