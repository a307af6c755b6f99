"""IVON on an unmodified LightningModule."""

from __future__ import annotations

import math
from typing import Any, final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import IVON, BetaSchedule, Schedule
from lightning_bayes.optim.diagonal.ivon import check_rescaling


@final
class IVONCallback(VariationalCallback):
    """Trains with improved variational online Newton (`lightning_bayes.IVON`): one backward pass of any layer.

    Args:
        betas: (β₁, β₂); the paper's β₂ is close to 1 because its curvature is noisy.
        clip_radius: Bound of each component of the natural step before the learning rate.
        rescale_lr: Multiply an explicit `lr` by the initial curvature, which compares it with SGD's.
        **arguments: As in `VariationalCallback`.

    Raises:
        HyperparameterError: If an argument lies outside of its range, or `rescale_lr` lacks what it needs.
    """

    optimizer_class = IVON

    def __init__(
        self,
        betas: tuple[float, float] | BetaSchedule = (0.9, 0.99999),
        clip_radius: float | Schedule = math.inf,
        rescale_lr: bool = False,
        **arguments: Any,
    ) -> None:
        own = {"clip_radius": clip_radius, "rescale_lr": rescale_lr}
        IVON.hyperparameters.check(own)
        super().__init__(betas=betas, **arguments)
        self.group_defaults.update(own)
        check_rescaling(self.group_defaults)
