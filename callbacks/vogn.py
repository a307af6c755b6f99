"""VOGN on an unmodified LightningModule."""

from __future__ import annotations

from typing import final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import VOGN


@final
class VOGNCallback(VariationalCallback):
    """Trains with variational online Gauss-Newton (`lightning_bayes.VOGN`).

    ``Trainer(callbacks=[VOGNCallback()])`` replaces the user's optimizer, keeps its learning rate and schedule, and stores a
    Gaussian posterior over the weights in the checkpoint.
    """

    optimizer_class = VOGN
