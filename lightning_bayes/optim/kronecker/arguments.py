"""The arguments that only K-FAC and Noisy K-FAC have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, get_args

from lightning_bayes.curvature import Likelihood
from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.fisher import FisherName, check_fisher
from lightning_bayes.optim.hyperparameters import Number
from lightning_bayes.optim.settings import POSITIVE, POSITIVE_COUNT, Setting, choice

PriorAt: TypeAlias = Literal["mean", "sample"]
UnsupportedLayers: TypeAlias = Literal["refuse", "mean_field", "fused"]


class KroneckerOwn(TypedDict, total=False):
    """Arguments that only K-FAC and Noisy K-FAC have.

    Attributes:
        stats_interval: T_stats, updates between measurements of the curvature. Default: 10; 20 for `NoisyKFACCallback` with
            the user's step.
        inverse_interval: T_inv, updates between inversions of a layer's factors; layers take turns. Default: 100; 200 for
            `NoisyKFACCallback` with the user's step.
        max_side: Layers whose matrix has a longer side use mean-field updates. Default: 4096.
        limit_mib: Limit in MiB on the memory of factors, inverses and roots. Default: 4096.
        fisher: ``"sampled"`` samples labels from the model's likelihood (the Fisher); ``"empirical"`` uses the data's.
            None samples if the likelihood is known. With ``engine="backpack"`` it applies to the other layers only.
        likelihood: The likelihood of the outputs. None looks for a `Likelihood` in the model's
            attribute ``lightning_bayes_likelihood``.
        kl_clip: c, the bound on the squared Fisher norm of the whole step; see `optim.kronecker.moves`. None: no bound.
            Zhang et al. use ``ExponentialSchedule(1e-3, 0.95, every=updates_per_epoch)``.
        factors: ``"kfac"`` with either engine; ``"kflr"`` or ``"kfra"`` with ``engine="backpack"``, which reads the
            likelihood from the loss. See `optim.kronecker.layers`. Default: ``"kfac"``.
        unsupported_layers: How to treat layers for which ``engine="backpack"`` has no factors: ``"refuse"`` raises an error
            that names them, ``"mean_field"`` measures their squared gradients, ``"fused"`` uses this package's rules.
            Default: ``"refuse"``.
    """

    kl_clip: Annotated[Number | None, Setting(POSITIVE, upper_limit=1e12, schedulable=True, optional=True)]
    stats_interval: Annotated[int, Setting(POSITIVE_COUNT, 10, in_group=False)]
    inverse_interval: Annotated[int, Setting(POSITIVE_COUNT, 100, in_group=False)]
    max_side: Annotated[int, Setting(POSITIVE_COUNT, 4096, in_group=False)]  # such a factor takes 64 MiB in float32
    limit_mib: Annotated[float, Setting(default=4096.0, in_group=False)]
    fisher: Annotated[FisherName | None, Setting(in_group=False)]
    likelihood: Annotated[Likelihood | None, Setting(in_group=False)]
    factors: Annotated[KroneckerQuantity, Setting(choice(*get_args(KroneckerQuantity)), "kfac", in_group=False)]
    unsupported_layers: Annotated[
        UnsupportedLayers, Setting(choice(*get_args(UnsupportedLayers)), "refuse", in_group=False)
    ]


class NoisyKroneckerOwn(KroneckerOwn, total=False):
    """Arguments that only Noisy K-FAC has.

    Attributes:
        prior_at: Where to compute the gradient of the prior: at the ``"mean"``, or at the ``"sample"`` as in Zhang et al.
            2018. The latter is part of the gradient of each pass, so gradient clipping includes it. Default: ``"mean"``.
    """

    prior_at: Annotated[PriorAt, Setting(choice(*get_args(PriorAt)), "mean", in_group=False)]


def require_matching(values: Mapping[str, Any]) -> None:
    """Raise `HyperparameterError` unless the intervals match, the engine measures the factors, and the Fisher exists."""
    if "stats_interval" not in values:  # a group
        return
    check_fisher(values["fisher"])
    stats, inverse = values["stats_interval"], values["inverse_interval"]
    if inverse < stats:
        raise HyperparameterError(
            f"inverse_interval={inverse} is below stats_interval={stats}: it would invert factors that have not changed. "
            f"Use inverse_interval={stats} or more."
        )
    if values["engine"] == "fused" and values["factors"] != "kfac":
        raise HyperparameterError(f"engine='fused' does not measure {values['factors']!r}; pass engine='backpack'.")
