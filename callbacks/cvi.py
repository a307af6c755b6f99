"""CVI on an unmodified LightningModule."""

from __future__ import annotations

from typing import final

from typing_extensions import Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields
from lightning_bayes.optim import CVI, Positivity


@final
class CVICallback(VariationalCallback):
    """Trains with conjugate-computation variational inference (`lightning_bayes.CVI`): VON with many samples per batch.

    Defaults: ``mc_samples=10`` and ``betas=(0.0, 0.999)``.

    Args:
        positivity: How the precision stays positive: ``"backtracking"`` or ``"correction"``, see `optim.diagonal.von`.
        **fields: See `CallbackFields`; ``engine`` has no effect.
    """

    optimizer_class = CVI

    def __init__(self, positivity: Positivity = "backtracking", **fields: Unpack[CallbackFields]) -> None:
        super().__init__(**fields)
        self.set_own(positivity=positivity)
