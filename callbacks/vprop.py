"""Vprop on an unmodified LightningModule."""

from __future__ import annotations

from typing import Any, final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import BetaSchedule, Vprop, Vprop0
from lightning_bayes.optim.diagonal.vprop import Scaling, check_scaling
from lightning_bayes.optim.steps.base_optimizer import CAUTIOUS_NOISE


class _VpropCallback(VariationalCallback):
    noise_bounds = CAUTIOUS_NOISE

    def __init__(
        self,
        betas: tuple[float, float] | BetaSchedule = (0.0, 0.999),
        scaling: Scaling = "mean",
        **arguments: Any,
    ) -> None:
        check_scaling(scaling)
        super().__init__(betas=betas, **arguments)
        self.group_defaults["scaling"] = scaling


@final
class VpropCallback(_VpropCallback):
    """Trains with variational RMSprop (`lightning_bayes.Vprop`): one backward pass of any layer.

    The width of its posterior depends on the batch size, see `optim.diagonal.gradient_magnitude`.

    Args:
        betas: (β₁, β₂), weights of the old momentum and of the old curvature; the papers have no momentum.
        scaling: ``"mean"`` (Khan et al. 2018) or ``"sum"`` (Khan et al. 2017, for all data in one batch).
        **arguments: As in `VariationalCallback`.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    optimizer_class = Vprop


@final
class Vprop0Callback(_VpropCallback):
    """Trains with Vprop without noise (`lightning_bayes.Vprop0`): it leaves no posterior.

    Args:
        betas: (β₁, β₂), weights of the old momentum and of the old curvature; the papers have no momentum.
        scaling: ``"mean"`` (Khan et al. 2018) or ``"sum"`` (Khan et al. 2017, for all data in one batch).
        **arguments: As in `VariationalCallback`.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    optimizer_class = Vprop0
