"""VadaGrad on an unmodified LightningModule."""

from __future__ import annotations

from typing import final

from typing_extensions import Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields
from lightning_bayes.optim import Schedule, VadaGrad
from lightning_bayes.optim.diagonal.vadagrad import require_unit_kl_weight


@final
class VadaGradCallback(VariationalCallback):
    """Trains with variational AdaGrad (`lightning_bayes.VadaGrad`), between inference and optimization.

    Default: ``betas=(0.0, 0.999)``, which is no momentum and, at temperature 1, the weight of the old curvature.

    Args:
        temperature: τ, from 1 (variational inference) to 0 (variational optimization, where the noise vanishes and leaves no
            posterior). May be a schedule.
        **fields: See `CallbackFields`; ``kl_weight`` must be 1.
    """

    optimizer_class = VadaGrad

    def __init__(self, temperature: float | Schedule = 0.0, **fields: Unpack[CallbackFields]) -> None:
        super().__init__(**fields)
        self.set_own(temperature=temperature)
        require_unit_kl_weight(self.group_defaults)
