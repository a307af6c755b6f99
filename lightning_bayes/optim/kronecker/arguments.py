"""Hyperparameters and constructor arguments of K-FAC and Noisy K-FAC."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bayes.curvature import Likelihood
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.optim.fisher import FisherName
from lightning_bayes.optim.hyperparameters import Hyperparameters, MeanFieldArguments
from lightning_bayes.optim.kronecker.factor_source import UnsupportedLayers
from lightning_bayes.optim.schedules import Schedule
from lightning_bayes.optim.settings import POSITIVE, POSITIVE_COUNT, setting

DEFAULT_MAX_SIDE = 4096  # a factor of this size takes 64 MiB in float32


@dataclass(frozen=True, kw_only=True)
class KroneckerHyperparameters(Hyperparameters):
    """Adds the bound on the step's Fisher norm and the maximum side of a factor."""

    kl_clip: float | None = setting(POSITIVE, upper_limit=1e12, schedulable=True, optional=True)
    max_side: int = setting(POSITIVE_COUNT, default=DEFAULT_MAX_SIDE, in_group=False)


class KroneckerArguments(MeanFieldArguments, total=False):
    """Keyword arguments of `KroneckerOptimizer`, which describes them, for subclasses that add arguments."""

    stats_interval: int
    inverse_interval: int
    max_side: int
    limit_mib: float
    fisher: FisherName | None
    likelihood: Likelihood | None
    kl_clip: float | Schedule | None
    factors: KroneckerQuantity
    unsupported_layers: UnsupportedLayers
