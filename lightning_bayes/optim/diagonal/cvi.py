"""Conjugate-computation variational inference (CVI), Khan & Lin 2017, https://arxiv.org/abs/1703.04265.

For a mean-field Gaussian (Khan et al. 2017, "Vprop", eqs. 7-8, https://arxiv.org/abs/1712.01038) the update is

    1/σ² ← (1-β)/σ² + β (E_q[diag ∇²F] + δ)        F: negative log-likelihood of the whole data set
    μ ← μ - β σ² (E_q[∇F] + δ μ)                     with the new σ²

This is `VON` with s = (τ/Ñ)/σ² - δ̃, a single rate β = α = 1-β₂, no momentum (β₁ = 0), and expectations over many samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from lightning_bayes.optim.diagonal.estimators import SecondOrder
from lightning_bayes.optim.diagonal.von import NewtonMethod, update
from lightning_bayes.optim.variational import VariationalOptimizer


@final
class CVI(NewtonMethod, VariationalOptimizer):
    """CVI as a `torch.optim.Optimizer`: VON with ten samples per step and no momentum; arguments as in `NewtonOwn`.

    The paper has a single rate: pass ``betas=(0.0, 1 - lr)``.
    """

    estimator = SecondOrder("diag_hessian")
    natural_update = staticmethod(update)
    own_defaults: ClassVar[Mapping[str, Any]] = {"mc_samples": 10, "betas": (0.0, 0.999)}  # 10: the paper's experiments
