"""Hyperparameters and constructor arguments of K-FAC and Noisy K-FAC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

from lightning_bayes.curvature import Likelihood
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.fisher import FisherName, check_fisher, label_source
from lightning_bayes.optim.hyperparameters import Hyperparameters, VariationalArguments
from lightning_bayes.optim.schedules import Schedule
from lightning_bayes.optim.settings import POSITIVE, POSITIVE_COUNT, choice, setting
from lightning_bayes.optim.weight_prior import refuse_weight_prior

UnsupportedLayers: TypeAlias = Literal["refuse", "mean_field", "fused"]

DEFAULT_MAX_SIDE = 4096  # a factor of this size takes 64 MiB in float32


class KroneckerArguments(VariationalArguments, total=False):
    """Keyword arguments of `KFAC` and `NoisyKFAC`: those of `VariationalOptimizer` and the following.

    Attributes:
        stats_interval: T_stats, updates between measurements of the curvature. Default: 10.
        inverse_interval: T_inv, updates between inversions of a layer's factors. Default: 100.
        max_side: Layers whose matrix has a longer side use mean-field updates. Default: 4096.
        limit_mib: Limit in MiB on the memory of factors, inverses and roots. Default: 4096.
        fisher: ``"sampled"`` samples labels from the model's likelihood (the Fisher); ``"empirical"`` uses the data's.
            None samples if the likelihood is known. With ``engine="backpack"`` it applies to the other layers only.
            Default: None.
        likelihood: The likelihood of the outputs. None looks for a `Likelihood` in the model's
            attribute ``lightning_bayes_likelihood``.
        kl_clip: c, the bound on the squared Fisher norm of the whole step; see `optim.kronecker.kl_clip`. None: no bound.
            Zhang et al. use ``ExponentialSchedule(1e-3, 0.95, every=updates_per_epoch)``.
        factors: ``"kfac"`` with either engine; ``"kflr"`` or ``"kfra"`` with ``engine="backpack"``, which reads the
            likelihood from the loss. See `optim.kronecker.layers`. Default: ``"kfac"``.
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
class KroneckerHyperparameters(Hyperparameters):
    """The hyperparameters that K-FAC adds; `KroneckerArguments` describes them."""

    kl_clip: float | None = setting(POSITIVE, default=None, upper_limit=1e12, schedulable=True, optional=True)
    max_side: int = setting(POSITIVE_COUNT, default=DEFAULT_MAX_SIDE, in_group=False)
    stats_interval: int = setting(POSITIVE_COUNT, default=10, in_group=False)
    inverse_interval: int = setting(POSITIVE_COUNT, default=100, in_group=False)
    limit_mib: float = setting(default=4096.0, in_group=False)
    fisher: FisherName | None = setting(default=None, in_group=False)
    likelihood: Likelihood | None = setting(default=None, in_group=False)
    factors: KroneckerQuantity = setting(choice(*get_args(KroneckerQuantity)), default="kfac", in_group=False)
    unsupported_layers: UnsupportedLayers = setting(
        choice(*get_args(UnsupportedLayers)), default="refuse", in_group=False
    )

    @classmethod
    def check(cls, values: Mapping[str, Any], *, complete: bool = False) -> None:
        """Also check that the two intervals, and the engine and its factors, match; see `Record.check`."""
        super().check(values, complete=complete)
        settings = cls.of(values)
        check_fisher(settings.fisher)
        if settings.inverse_interval < settings.stats_interval:
            raise HyperparameterError(
                f"inverse_interval={settings.inverse_interval} is below stats_interval={settings.stats_interval}: it would "
                f"invert factors that have not changed. Use inverse_interval={settings.stats_interval} or more."
            )
        if settings.engine == "fused" and settings.factors != "kfac":
            raise HyperparameterError(f"engine='fused' does not measure {settings.factors!r}; pass engine='backpack'.")


def settings_for(optimizer: str, model: nn.Module, arguments: Mapping[str, Any]) -> KroneckerHyperparameters:
    """Read K-FAC's settings; raises `HyperparameterError` if labels cannot be sampled, or for a per-weight prior."""
    settings = KroneckerHyperparameters.of(arguments)
    refuse_weight_prior(optimizer, settings.prior)
    label_source(settings.fisher, settings.likelihood, model)
    return settings
