"""K-FAC and Noisy K-FAC as optimizers; `optim.kronecker.equations` is the algorithm."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict, cast, final, get_args

from torch import nn
from typing_extensions import Unpack

from lightning_bayes.curvature.measurement import KroneckerQuantity
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.likelihood import OutputLikelihood
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator
from lightning_bayes.optim.diagonal.vogn import update as vogn_update
from lightning_bayes.optim.fisher import FisherName, check_fisher, label_source
from lightning_bayes.optim.hyperparameters import DeclaresArguments, Number, VariationalArguments
from lightning_bayes.optim.kronecker.curvature import KroneckerFactorsEstimator
from lightning_bayes.optim.kronecker.family import KroneckerFamily
from lightning_bayes.optim.settings import POSITIVE, POSITIVE_COUNT, Setting, choice, joined_help
from lightning_bayes.optim.variational import VariationalOptimizer
from lightning_bayes.optim.weight_prior import refuse_weight_prior

PriorAt: TypeAlias = Literal["mean", "sample"]
UnsupportedLayers: TypeAlias = Literal["refuse", "mean_field", "fused"]


class KroneckerOwn(TypedDict, total=False):
    """Arguments that only K-FAC and Noisy K-FAC have.

    Attributes:
        stats_interval: T_stats, updates between measurements of the curvature. Default: 10, and 20 for `NoisyKFACCallback`
            with the user's step.
        inverse_interval: T_inv, updates between inversions of a layer's factors, in which layers take turns. Default: 100,
            and 200 for `NoisyKFACCallback` with the user's step.
        max_side: Layers whose matrix has a longer side use mean-field updates. Default: 4096.
        limit_mib: Limit in MiB on the memory of factors, inverses and roots. Default: 4096.
        fisher: Labels of the Fisher, ``"sampled"`` from the model's likelihood or the data's, which is ``"empirical"``.
            None: sampled if the likelihood is known. With ``engine="backpack"`` it applies to the other layers only.
        likelihood: The likelihood of the outputs. None: a `Likelihood` in the model's
            attribute ``lightning_bayes_likelihood``.
        kl_clip: c, the bound on the squared Fisher norm of the whole step; see `optim.kronecker.moves`. None: no bound.
            Zhang et al. use ``ExponentialSchedule(1e-3, 0.95, every=updates_per_epoch)``.
        factors: Curvature factors, ``"kfac"`` with either engine, ``"kflr"`` or ``"kfra"`` with
            ``engine="backpack"``, which reads the likelihood from the loss. See `optim.kronecker.layers`.
            Default: ``"kfac"``.
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
    likelihood: Annotated[OutputLikelihood | None, Setting(in_group=False)]
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


NoisyKroneckerOwn.__doc__ = joined_help(KroneckerOwn, NoisyKroneckerOwn)


class KFACArguments(VariationalArguments, KroneckerOwn, total=False):
    """Keyword arguments of `KFAC`."""


class NoisyKFACArguments(VariationalArguments, NoisyKroneckerOwn, total=False):
    """Keyword arguments of `NoisyKFAC`."""


class KroneckerMethod(DeclaresArguments, ABC):
    """What K-FAC and Noisy K-FAC have in common."""

    family_type = KroneckerFamily
    averages_curvature = True
    estimator: CurvatureEstimator = KroneckerFactorsEstimator()
    prior_at_sample: ClassVar[bool] = False
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.95)}  # β₂ is per measurement, not per update

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> None:
        """Also check the intervals and the factors."""
        super().check_together(values)
        if "stats_interval" not in values:  # a group
            return
        check_fisher(values["fisher"])
        stats, inverse = values["stats_interval"], values["inverse_interval"]
        if inverse < stats:
            raise HyperparameterError(
                f"inverse_interval={inverse} is below stats_interval={stats}: it would invert factors that have not "
                f"changed. Use inverse_interval={stats} or more."
            )
        if values["engine"] == "fused" and values["factors"] != "kfac":
            raise HyperparameterError(f"engine='fused' does not measure {values['factors']!r}; pass engine='backpack'.")

    def configure(self, model: nn.Module, values: Mapping[str, Any]) -> None:
        """Choose the factors, and where the prior's gradient is; refuse a Fisher without labels and per-weight priors."""
        refuse_weight_prior(type(self).__name__, values["prior"])
        samples = label_source(values["fisher"], values["likelihood"], model) is not None
        self.estimator = KroneckerFactorsEstimator(values["factors"], samples_labels=samples)
        self.prior_at_sample = values.get("prior_at") == "sample"  # type: ignore[misc]


@final
class KFAC(KroneckerMethod, VariationalOptimizer):
    """K-FAC as a `torch.optim.Optimizer`, without noise and without a posterior; see `VariationalOptimizer`, `KroneckerOwn`.

    It is the baseline of Zhang et al. 2018. Tune it before switching to `NoisyKFAC`. Linear layers and convolutions have
    Kronecker factors; all other parameters use VOGN's update.
    """

    noisy = False
    default_step = "trust_region"  # with the user's step nothing of K-FAC would remain
    natural_update = staticmethod(vogn_update)
    own_arguments = KroneckerOwn

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **arguments: Unpack[KFACArguments]
    ) -> None:
        super().__init__(model, params, **cast(VariationalArguments, arguments))


@final
class NoisyKFAC(KroneckerMethod, VariationalOptimizer):
    """Noisy K-FAC as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer` and `NoisyKroneckerOwn`.

    Linear layers and convolutions have Kronecker factors and a matrix Gaussian posterior; all other parameters use VOGN's
    update.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = NoisyKFAC(model, lr=0.1, num_data=4)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> [factor.shape for factor in opt.posterior().factors["weight"]]  # the bias is a column of the matrix
        [torch.Size([1, 1]), torch.Size([3, 3])]
    """

    noisy = True
    natural_update = staticmethod(vogn_update)
    own_arguments = NoisyKroneckerOwn

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **arguments: Unpack[NoisyKFACArguments]
    ) -> None:
        super().__init__(model, params, **cast(VariationalArguments, arguments))
