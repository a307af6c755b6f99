"""Online Gauss-Newton (OGN): VOGN without noise, so gradients are evaluated at the mean.

Osawa et al. 2019 (https://arxiv.org/abs/1906.02506) use it as the deterministic baseline, and recommend tuning it like Adam
before switching to VOGN. It is a point estimate without a posterior.
"""

from __future__ import annotations

from typing import final

from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.vogn import update
from lightning_bayes.optim.variational import VariationalOptimizer


@final
class OGN(VariationalOptimizer):
    """OGN as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer`. Noise arguments have no effect."""

    noisy = False
    family_type = DiagonalFamily
    amortises = True
    default_step = "trust_region"
    natural_update = staticmethod(update)
