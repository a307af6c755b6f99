"""Bayes by Backprop on an unmodified LightningModule."""

from __future__ import annotations

from typing import final

from typing_extensions import Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields
from lightning_bayes.optim import BBB, Schedule


@final
class BBBCallback(VariationalCallback):
    """Trains with Bayes by Backprop (`lightning_bayes.BBB`): Adam on the bound's pathwise gradient.

    Args:
        std_lr: Learning rate of log σ. None uses the mean's learning rate, which is the user's if `lr` is None.
        **fields: See `CallbackFields`; ``engine`` has no effect.
    """

    optimizer_class = BBB

    def __init__(self, std_lr: float | Schedule | None = None, **fields: Unpack[CallbackFields]) -> None:
        super().__init__(**fields)
        self.set_own(std_lr=std_lr)
