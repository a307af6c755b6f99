"""VON on an unmodified LightningModule."""

from __future__ import annotations

from typing import Literal, final, get_args

from typing_extensions import Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim import VON, MeanFieldOptimizer, Positivity, ReparameterisedVON

Hessian = Literal["exact", "reparameterised"]


@final
class VONCallback(VariationalCallback):
    """Trains with variational online Newton (`lightning_bayes.VON`, `lightning_bayes.ReparameterisedVON`).

    Args:
        hessian: ``"exact"``, computed by BackPACK for the models that it supports; or ``"reparameterised"``, estimated from
            gradient and noise for any model.
        positivity: How the precision stays positive: ``"backtracking"`` or ``"correction"``, see `optim.diagonal.von`.
        **fields: See `CallbackFields`; ``engine`` has no effect.

    Raises:
        HyperparameterError: If `hessian` is unknown, or an argument lies outside of its range.
    """

    def __init__(
        self, hessian: Hessian = "exact", positivity: Positivity = "backtracking", **fields: Unpack[CallbackFields]
    ) -> None:
        if hessian not in get_args(Hessian):
            raise HyperparameterError(f"hessian={hessian!r} must be one of {', '.join(map(repr, get_args(Hessian)))}.")
        self.hessian = hessian  # selects `optimizer_class`, which the base class reads
        super().__init__(**fields)
        self.set_own(positivity=positivity)

    @property
    def optimizer_class(self) -> type[MeanFieldOptimizer]:
        """The optimizer for the chosen Hessian."""
        return VON if self.hessian == "exact" else ReparameterisedVON
