"""VadaGrad on an unmodified LightningModule."""

from __future__ import annotations

from typing import Any, final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import BetaSchedule, Schedule, VadaGrad
from lightning_bayes.optim.diagonal.vadagrad import require_unit_kl_weight
from lightning_bayes.optim.steps.base_optimizer import CAUTIOUS_NOISE


@final
class VadaGradCallback(VariationalCallback):
    """Trains with variational AdaGrad (`lightning_bayes.VadaGrad`), between inference and optimization.

    Args:
        betas: (β₁, 1 - β), weights of the old momentum and, at temperature 1, of the old curvature.
        temperature: τ, from 1 (the variational bound) to 0 (variational optimization: the noise dies out, and what is left
            is no posterior); may be a function of the number of updates.
        **arguments: As in `VariationalCallback`; ``kl_weight`` must be 1.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    optimizer_class = VadaGrad
    noise_bounds = CAUTIOUS_NOISE

    def __init__(
        self,
        betas: tuple[float, float] | BetaSchedule = (0.0, 0.999),
        temperature: float | Schedule = 0.0,
        **arguments: Any,
    ) -> None:
        VadaGrad.hyperparameters.check({"temperature": temperature})
        super().__init__(betas=betas, **arguments)
        self.group_defaults["temperature"] = temperature
        require_unit_kl_weight(self.group_defaults)
