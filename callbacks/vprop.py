"""Vprop on an unmodified LightningModule."""

from __future__ import annotations

from typing import final

from typing_extensions import Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fields import CallbackFields
from lightning_bayes.optim import Vprop, Vprop0
from lightning_bayes.optim.diagonal.vprop import Scaling


@final
class VpropCallback(VariationalCallback):
    """Trains with variational RMSprop (`lightning_bayes.Vprop`): one backward pass of any layer.

    Default: ``betas=(0.0, 0.999)``, because the papers use no momentum. The posterior's width depends on the batch size, see
    `optim.diagonal.estimators.batch_square`.

    Args:
        scaling: ``"mean"`` (Khan et al. 2018) or ``"sum"`` (Khan et al. 2017, for all data in one batch).
        **fields: See `CallbackFields`.
    """

    optimizer_class = Vprop

    def __init__(self, scaling: Scaling = "mean", **fields: Unpack[CallbackFields]) -> None:
        super().__init__(**fields)
        self.set_own(scaling=scaling)


@final
class Vprop0Callback(VariationalCallback):
    """Trains with Vprop without noise (`lightning_bayes.Vprop0`): it leaves no posterior.

    Args:
        scaling: ``"mean"`` (Khan et al. 2018) or ``"sum"`` (Khan et al. 2017, for all data in one batch).
        **fields: See `CallbackFields`.
    """

    optimizer_class = Vprop0

    def __init__(self, scaling: Scaling = "mean", **fields: Unpack[CallbackFields]) -> None:
        super().__init__(**fields)
        self.set_own(scaling=scaling)
