"""Bayes by Backprop on an unmodified LightningModule."""

from __future__ import annotations

from typing import Any, final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import BBB, Schedule


@final
class BBBCallback(VariationalCallback):
    """Trains with Bayes by Backprop (`lightning_bayes.BBB`): Adam on the bound's pathwise gradient.

    Args:
        std_lr: Learning rate of log σ; None for that of the mean, which is the user's own where `lr` is None.
        **arguments: See `VariationalCallback`; ``engine`` has no effect.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    optimizer_class = BBB

    def __init__(self, std_lr: float | Schedule | None = None, **arguments: Any) -> None:
        BBB.hyperparameters.check({"std_lr": std_lr})
        super().__init__(**arguments)
        self.group_defaults["std_lr"] = std_lr
