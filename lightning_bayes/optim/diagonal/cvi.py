"""Conjugate-computation variational inference (CVI), Khan & Lin 2017, https://arxiv.org/abs/1703.04265.

For a mean-field Gaussian (Khan et al. 2017, "Vprop", eqs. 7-8, https://arxiv.org/abs/1712.01038) it is

    1/σ² ← (1-β)/σ² + β (E_q[diag ∇²F] + δ)        F: negative log-likelihood of the whole data set
    μ ← μ - β σ² (E_q[∇F] + δ μ)                     with the new σ²

which is `VON` with s = (τ/Ñ)/σ² - δ̃, one rate β = α = 1-β₂, no momentum (β₁ = 0), and expectations over many samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch import nn

from lightning_bayes.optim.diagonal.von import NewtonOptimizer, update
from lightning_bayes.optim.schedules import BetaSchedule

MC_SAMPLES = 10  # of the paper's experiments


@final
class CVI(NewtonOptimizer):
    """CVI as a `torch.optim.Optimizer`: VON with ten samples a step and no momentum.

    Args:
        model: See `VON` for the models whose Hessian it can have.
        params: See `MeanFieldOptimizer`.
        mc_samples: K, weight samples per ``step(closure)``.
        betas: (β₁, β₂); the paper's one rate is ``lr`` = 1-β₂.
        **arguments: See `NewtonOptimizer`.

    Raises:
        HyperparameterError: If a value lies outside of its range.
    """

    measures = "diag_hessian"
    natural_update = staticmethod(update)

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        mc_samples: int = MC_SAMPLES,
        betas: tuple[float, float] | BetaSchedule = (0.0, 0.999),
        **arguments: Any,
    ) -> None:
        super().__init__(model, params, mc_samples=mc_samples, betas=betas, **arguments)
