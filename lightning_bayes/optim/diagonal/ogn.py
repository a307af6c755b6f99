"""Online Gauss-Newton (OGN): VOGN's update with the noise off, so gradients are taken at the mean.

Osawa et al. 2019 (https://arxiv.org/abs/1906.02506) use it as the deterministic baseline, and advise to tune it like
Adam before noise is switched on. It leaves a point, no posterior.
"""

from __future__ import annotations

from typing import final

from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer
from lightning_bayes.optim.diagonal.vogn import update


@final
class OGN(MeanFieldOptimizer):
    """OGN as a `torch.optim.Optimizer`; arguments as in `MeanFieldOptimizer`, those of the noise without effect."""

    noisy = False
    amortises = True
    default_step = "trust_region"
    natural_update = staticmethod(update)
