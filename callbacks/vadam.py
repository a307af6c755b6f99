"""Vadam on an unmodified LightningModule."""

from __future__ import annotations

from typing import final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import Vadam


@final
class VadamCallback(VariationalCallback):
    """Trains with variational Adam (`lightning_bayes.Vadam`): one backward pass of any layer, at Adam's cost.

    The width of the posterior depends on the batch size, see `optim.diagonal.estimators.batch_square`.
    """

    optimizer_class = Vadam
