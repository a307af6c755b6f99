"""K-FAC and Noisy K-FAC as optimizers; `optim.kronecker.equations` is the algorithm."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast, final

from torch import nn
from typing_extensions import Unpack

from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator
from lightning_bayes.optim.diagonal.vogn import update as vogn_update
from lightning_bayes.optim.fisher import label_source
from lightning_bayes.optim.hyperparameters import DeclaresArguments, VariationalArguments
from lightning_bayes.optim.kronecker.arguments import KroneckerOwn, NoisyKroneckerOwn, require_matching
from lightning_bayes.optim.kronecker.curvature import KroneckerFactorsEstimator
from lightning_bayes.optim.kronecker.family import KroneckerFamily
from lightning_bayes.optim.variational import VariationalOptimizer
from lightning_bayes.optim.weight_prior import refuse_weight_prior


class KFACArguments(VariationalArguments, KroneckerOwn, total=False):
    """Keyword arguments of `KFAC`."""


class NoisyKFACArguments(VariationalArguments, NoisyKroneckerOwn, total=False):
    """Keyword arguments of `NoisyKFAC`."""


class KroneckerMethod(DeclaresArguments, ABC):
    """What K-FAC and Noisy K-FAC have in common."""

    family_type = KroneckerFamily
    averages_curvature = True
    estimator: ClassVar[CurvatureEstimator] = KroneckerFactorsEstimator()
    prior_at_sample: ClassVar[bool] = False
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.95)}  # β₂ is per measurement, not per update

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> None:
        """Also check the intervals and the factors; see `VariationalOptimizer`."""
        super().check_together(values)
        require_matching(values)

    def configure(self, model: nn.Module, values: Mapping[str, Any]) -> None:
        """Choose the factors, and where the prior's gradient is; refuse a Fisher without labels and per-weight priors."""
        refuse_weight_prior(type(self).__name__, values["prior"])
        label_source(values["fisher"], values["likelihood"], model)
        self.estimator = KroneckerFactorsEstimator(values["factors"])  # type: ignore[misc]
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
