"""K-FAC and Noisy K-FAC as optimizers; `optim.kronecker.equations` is the algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, final, get_args

from torch import nn
from typing_extensions import Unpack

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.diagonal.vogn import update as vogn_update
from lightning_bayes.optim.kronecker.arguments import KroneckerArguments, KroneckerHyperparameters, settings_for
from lightning_bayes.optim.kronecker.curvature import KroneckerFactorsEstimator
from lightning_bayes.optim.kronecker.family import KroneckerFamily
from lightning_bayes.optim.variational import VariationalOptimizer

PriorAt: TypeAlias = Literal["mean", "sample"]

_BETAS = (0.9, 0.95)  # β₂ is per measurement, not per update


@final
class KFAC(VariationalOptimizer):
    """K-FAC as a `torch.optim.Optimizer`, without noise and without a posterior.

    It is the baseline of Zhang et al. 2018. Tune it before switching to `NoisyKFAC`. Linear layers and convolutions have
    Kronecker factors; all other parameters use VOGN's update.

    Args:
        model: See `VariationalOptimizer`.
        params: See `VariationalOptimizer`.
        **fields: See `KroneckerArguments`.

    Raises:
        HyperparameterError: If a value is out of range.
    """

    noisy = False
    averages_curvature = True
    default_step = "trust_region"  # with the user's step nothing of K-FAC would remain
    estimator = KroneckerFactorsEstimator()
    natural_update = staticmethod(vogn_update)
    hyperparameters = KroneckerHyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": _BETAS}

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **fields: Unpack[KroneckerArguments]
    ) -> None:
        self.settings = settings_for(type(self).__name__, model, fields)
        self.family_type = partial(KroneckerFamily, settings=self.settings)  # type: ignore[misc]
        self.estimator = KroneckerFactorsEstimator(self.settings.factors)  # type: ignore[misc]
        super().__init__(model, params, base=fields.pop("base", None), own=fields)


@final
class NoisyKFAC(VariationalOptimizer):
    """Noisy K-FAC as a `torch.optim.Optimizer`.

    Linear layers and convolutions have Kronecker factors and a matrix Gaussian posterior; all other parameters use VOGN's
    update.

    Args:
        model: See `VariationalOptimizer`.
        params: See `VariationalOptimizer`.
        prior_at: Where to compute the gradient of the prior: at the ``"mean"``, or at the ``"sample"`` as in the paper. The
            latter is part of the gradient of each pass, so gradient clipping includes it.
        **fields: See `KroneckerArguments`.

    Raises:
        HyperparameterError: If a value is out of range.

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
    averages_curvature = True
    estimator = KroneckerFactorsEstimator()
    natural_update = staticmethod(vogn_update)
    hyperparameters = KroneckerHyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": _BETAS}

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        prior_at: PriorAt = "mean",
        **fields: Unpack[KroneckerArguments],
    ) -> None:
        check_prior_at(prior_at)
        self.prior_at_sample = prior_at == "sample"  # type: ignore[misc]
        self.settings = settings_for(type(self).__name__, model, fields)
        self.family_type = partial(KroneckerFamily, settings=self.settings)  # type: ignore[misc]
        self.estimator = KroneckerFactorsEstimator(self.settings.factors)  # type: ignore[misc]
        super().__init__(model, params, base=fields.pop("base", None), own=fields)


def check_prior_at(prior_at: str) -> None:
    """Raise `HyperparameterError` unless `prior_at` is ``"mean"`` or ``"sample"``."""
    if prior_at not in get_args(PriorAt):
        raise HyperparameterError(f"prior_at={prior_at!r} must be 'mean' or 'sample'.")
