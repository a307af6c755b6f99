"""VON with natural momentum on an unmodified LightningModule."""

from __future__ import annotations

from typing import final

from typing_extensions import Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields
from lightning_bayes.optim import MomentumVON, Positivity


@final
class MomentumVONCallback(VariationalCallback):
    """Trains with variational online Newton and natural momentum (`lightning_bayes.MomentumVON`).

    Args:
        positivity: How the precision stays positive: ``"backtracking"`` or ``"correction"``, see `optim.diagonal.von`.
        **fields: See `CallbackFields`; ``engine`` has no effect.
    """

    optimizer_class = MomentumVON

    def __init__(self, positivity: Positivity = "backtracking", **fields: Unpack[CallbackFields]) -> None:
        super().__init__(**fields)
        self.set_own(positivity=positivity)
