"""VON with natural momentum on an unmodified LightningModule."""

from __future__ import annotations

from typing import Any, final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import MomentumVON, Positivity, check_positivity


@final
class MomentumVONCallback(VariationalCallback):
    """Trains with variational online Newton and natural momentum (`lightning_bayes.MomentumVON`).

    Args:
        positivity: How the precision stays positive: ``"backtracking"`` or ``"correction"``, see `optim.diagonal.von`.
        **arguments: See `VariationalCallback`; ``engine`` has no effect.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    optimizer_class = MomentumVON

    def __init__(self, positivity: Positivity = "backtracking", **arguments: Any) -> None:
        super().__init__(**arguments)
        check_positivity(positivity)
        self.group_defaults["positivity"] = positivity
