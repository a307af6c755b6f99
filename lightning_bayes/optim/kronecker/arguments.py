"""Hyperparameters and constructor arguments of K-FAC and Noisy K-FAC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

from torch import nn

from lightning_bayes.curvature import Likelihood
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.optim.fisher import FisherName, check_fisher, label_source
from lightning_bayes.optim.hyperparameters import Hyperparameters, MeanFieldArguments
from lightning_bayes.optim.kronecker.factor_source import UnsupportedLayers, check_factors
from lightning_bayes.optim.kronecker.intervals import check_intervals
from lightning_bayes.optim.schedules import Schedule
from lightning_bayes.optim.settings import POSITIVE, POSITIVE_COUNT, setting
from lightning_bayes.optim.weight_prior import refuse_weight_prior

DEFAULT_MAX_SIDE = 4096  # a factor of this size takes 64 MiB in float32


@dataclass(frozen=True, kw_only=True)
class KroneckerHyperparameters(Hyperparameters):
    """Adds the bound on the step's Fisher norm and the maximum side of a factor."""

    kl_clip: float | None = setting(POSITIVE, upper_limit=1e12, schedulable=True, optional=True)
    max_side: int = setting(POSITIVE_COUNT, default=DEFAULT_MAX_SIDE, in_group=False)


class KroneckerArguments(MeanFieldArguments, total=False):
    """Keyword arguments of `KFAC` and `NoisyKFAC`: those of `MeanFieldOptimizer` and the following.

    Attributes:
        stats_interval: T_stats, updates between measurements of the curvature. Default: 10.
        inverse_interval: T_inv, updates between inversions of a layer's factors. Default: 100.
        max_side: Layers whose matrix has a longer side use mean-field updates. Default: 4096.
        limit_mib: Limit in MiB on the memory of factors, inverses and roots. Default: 4096.
        fisher: ``"sampled"`` samples labels from the model's likelihood (the Fisher); ``"empirical"`` uses the data's.
            None samples if the likelihood is known. With ``engine="backpack"`` it applies to the other layers only.
            Default: None.
        likelihood: The likelihood of the outputs. None looks for a `Likelihood` in the model's attribute ``likelihood``.
        kl_clip: c, the bound on the squared Fisher norm of the whole step; see `optim.kronecker.kl_clip`. None: no bound.
            Zhang et al. use ``ExponentialSchedule(1e-3, 0.95, every=updates_per_epoch)``.
        factors: ``"kfac"`` with either engine; ``"kflr"`` or ``"kfra"`` with ``engine="backpack"``, which reads the
            likelihood from the loss. See `optim.kronecker.factor_source`. Default: ``"kfac"``.
        unsupported_layers: How to treat layers for which ``engine="backpack"`` has no factors: ``"refuse"``,
            ``"mean_field"``, or ``"fused"`` to use this package's rules. Default: ``"refuse"``.
    """

    stats_interval: int
    inverse_interval: int
    max_side: int
    limit_mib: float
    fisher: FisherName | None
    likelihood: Likelihood | None
    kl_clip: float | Schedule | None
    factors: KroneckerQuantity
    unsupported_layers: UnsupportedLayers


@dataclass(frozen=True, kw_only=True)
class KroneckerSettings:
    """The values of the arguments that only K-FAC has; `KroneckerArguments` describes them."""

    stats_interval: int = 10
    inverse_interval: int = 100
    max_side: int = DEFAULT_MAX_SIDE
    limit_mib: float = 4096.0
    fisher: FisherName | None = None
    likelihood: Likelihood | None = None
    kl_clip: float | Schedule | None = None
    factors: KroneckerQuantity = "kfac"
    unsupported_layers: UnsupportedLayers = "refuse"

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The values that `KroneckerHyperparameters` checks."""
        return {"kl_clip": self.kl_clip, "max_side": self.max_side}

    def check(self, engine: str) -> None:
        """Raise `HyperparameterError` if an argument is out of range, or `engine` does not measure the factors."""
        check_intervals(self.stats_interval, self.inverse_interval)
        check_fisher(self.fisher)
        check_factors(engine, self.factors, self.unsupported_layers)


class SplitArguments(NamedTuple):
    """Constructor arguments of K-FAC, by consumer."""

    kronecker: KroneckerSettings
    shared: MeanFieldArguments  # of `MeanFieldOptimizer`


def split_arguments(optimizer: str, model: nn.Module, arguments: Mapping[str, Any]) -> SplitArguments:
    """Split the arguments of K-FAC and check the ones that only K-FAC has.

    Args:
        optimizer: Name of the optimizer, for messages.
        model: The model to train.
        arguments: Keyword arguments as in `KroneckerArguments`.

    Returns:
        The arguments, with the defaults of K-FAC's own.
    """
    names = {field.name for field in fields(KroneckerSettings)}
    own = KroneckerSettings(**{name: value for name, value in arguments.items() if name in names})
    shared = {name: value for name, value in arguments.items() if name not in names}
    own.check(shared.get("engine", "fused"))
    refuse_weight_prior(optimizer, shared.get("prior"))
    label_source(own.fisher, own.likelihood, model)
    return SplitArguments(own, cast(MeanFieldArguments, shared))
