"""K-FAC and Noisy K-FAC as optimizers; `optim.kronecker.equations` is the algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast, final

from torch import nn
from typing_extensions import Unpack

from lightning_bayes.optim.diagonal.vogn import update as vogn_update
from lightning_bayes.optim.fisher import label_source
from lightning_bayes.optim.hyperparameters import VariationalArguments
from lightning_bayes.optim.kronecker.arguments import KroneckerOwn, NoisyKroneckerOwn, require_matching
from lightning_bayes.optim.kronecker.curvature import KroneckerFactorsEstimator
from lightning_bayes.optim.kronecker.family import KroneckerFamily
from lightning_bayes.optim.variational import VariationalOptimizer
from lightning_bayes.optim.weight_prior import refuse_weight_prior

_BETAS = (0.9, 0.95)  # β₂ is per measurement, not per update


class KFACArguments(VariationalArguments, KroneckerOwn, total=False):
    """Keyword arguments of `KFAC`."""


class NoisyKFACArguments(VariationalArguments, NoisyKroneckerOwn, total=False):
    """Keyword arguments of `NoisyKFAC`."""


@final
class KFAC(VariationalOptimizer):
    """K-FAC as a `torch.optim.Optimizer`, without noise and without a posterior; see `VariationalOptimizer`, `KroneckerOwn`.

    It is the baseline of Zhang et al. 2018. Tune it before switching to `NoisyKFAC`. Linear layers and convolutions have
    Kronecker factors; all other parameters use VOGN's update.
    """

    noisy = False
    family_type = KroneckerFamily
    averages_curvature = True
    default_step = "trust_region"  # with the user's step nothing of K-FAC would remain
    estimator = KroneckerFactorsEstimator()
    natural_update = staticmethod(vogn_update)
    own_arguments = KroneckerOwn
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": _BETAS}

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **arguments: Unpack[KFACArguments]
    ) -> None:
        super().__init__(model, params, **cast(VariationalArguments, arguments))

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> None:
        """Also check the intervals and the factors; see `VariationalOptimizer`."""
        super().check_together(values)
        require_matching(values)

    def configure(self, model: nn.Module, values: Mapping[str, Any]) -> None:
        """Choose the factors; see `VariationalOptimizer`."""
        self.estimator = _estimator(type(self).__name__, model, values)  # type: ignore[misc]


@final
class NoisyKFAC(VariationalOptimizer):
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
    family_type = KroneckerFamily
    averages_curvature = True
    estimator = KroneckerFactorsEstimator()
    natural_update = staticmethod(vogn_update)
    own_arguments = NoisyKroneckerOwn
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": _BETAS}

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **arguments: Unpack[NoisyKFACArguments]
    ) -> None:
        super().__init__(model, params, **cast(VariationalArguments, arguments))

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> None:
        """Also check the intervals and the factors; see `VariationalOptimizer`."""
        super().check_together(values)
        require_matching(values)

    def configure(self, model: nn.Module, values: Mapping[str, Any]) -> None:
        """Choose the factors, and where the prior's gradient is; see `VariationalOptimizer`."""
        self.estimator = _estimator(type(self).__name__, model, values)  # type: ignore[misc]
        self.prior_at_sample = values["prior_at"] == "sample"  # type: ignore[misc]


def _estimator(method: str, model: nn.Module, values: Mapping[str, Any]) -> KroneckerFactorsEstimator:
    """The estimator of the chosen factors; raises `HyperparameterError` without labels, or for a per-weight prior."""
    refuse_weight_prior(method, values["prior"])
    label_source(values["fisher"], values["likelihood"], model)
    return KroneckerFactorsEstimator(values["factors"])
