"""Any variational optimizer on an unmodified LightningModule, such as one of your own."""

from __future__ import annotations

from typing import final

from typing_extensions import Never, Unpack

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.callbacks.fit.fields import CallbackFields
from lightning_bayes.optim import VariationalOptimizer


@final
class OptimizerCallback(VariationalCallback):
    """Trains with any `lightning_bayes.optim.VariationalOptimizer`: ``OptimizerCallback(optimizer=MyVOGN, lr=0.1)``.

    In a config, `optimizer` is the import path of the class. On the command line,
    ``--config digits+lenet5+my_package.my_file:MyVOGN`` stands for this callback.

    Args:
        optimizer: The class of the optimizer, which sets the defaults of the other arguments.
        **fields: As listed below, and the arguments that only this optimizer has; a config passes those in ``dict_kwargs``.
    """

    optimizer_class: type[VariationalOptimizer] = VariationalOptimizer

    def __init__(
        self, *unnamed: Never, optimizer: type[VariationalOptimizer], **fields: Unpack[CallbackFields]
    ) -> None:
        self.optimizer_class = optimizer  # the base class reads it
        super().__init__(*unnamed, **fields)
