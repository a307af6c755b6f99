"""CVI on an unmodified LightningModule."""

from __future__ import annotations

from typing import Any, final

from lightning_bayes.callbacks.base import VariationalCallback
from lightning_bayes.optim import CVI, BetaSchedule, Positivity, check_positivity


@final
class CVICallback(VariationalCallback):
    """Trains with conjugate-computation variational inference (`lightning_bayes.CVI`): VON with many samples a batch.

    Args:
        mc_samples: K, weight samples per batch and process in training.
        betas: (β₁, β₂), weights of the old momentum and of the old curvature.
        positivity: How the precision stays positive: ``"backtracking"`` or ``"correction"``, see `optim.diagonal.von`.
        **arguments: See `VariationalCallback`; ``engine`` has no effect.

    Raises:
        HyperparameterError: If an argument lies outside of its range.
    """

    optimizer_class = CVI

    def __init__(
        self,
        mc_samples: int = 10,
        betas: tuple[float, float] | BetaSchedule = (0.0, 0.999),
        positivity: Positivity = "backtracking",
        **arguments: Any,
    ) -> None:
        super().__init__(mc_samples=mc_samples, betas=betas, **arguments)
        check_positivity(positivity)
        self.group_defaults["positivity"] = positivity
