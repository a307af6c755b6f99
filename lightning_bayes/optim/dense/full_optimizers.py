"""Full-covariance optimizers for small models: `FullVON`, `VONG`, `NNGFull`, around `optim.dense.full_gaussian`.

They differ in Ĥ: the exact Hessian, the mean of g_i g_iᵀ with the data's labels, or with labels sampled from the model. A
D × D matrix is stored, and factorised in every pass and every update, which limits D to a few thousand weights.
"""

from __future__ import annotations

from typing import final

from torch import nn
from typing_extensions import Unpack

from lightning_bayes.curvature import Likelihood, LossReduction
from lightning_bayes.optim.dense.estimators import HessianEstimator, OuterProductEstimator
from lightning_bayes.optim.dense.full_covariance import FullCovariance
from lightning_bayes.optim.dense.joint_optimizer import JointFields, JointOptimizer
from lightning_bayes.optim.runtime.parameters import trainable
from lightning_bayes.posteriors import FullGaussian, check_full_size
from lightning_bayes.posteriors.memory import DEFAULT_LIMIT_MIB


@final
class FullVON(JointOptimizer[FullGaussian]):
    """Variational online Newton with the full Hessian (Khan et al. 2018, eqs. 7-9), as a `torch.optim.Optimizer`.

    The Hessian requires one backward pass per weight. If its negative eigenvalues outweigh the prior, no posterior exists,
    and the error suggests a larger ``prior_precision``, or ``damping`` with ``damping_in_noise=True``. With
    ``betas=(0, 1 - lr)`` the algorithm is CVI.

    Args:
        model: Any twice differentiable model.
        limit_mib: Maximum memory of one D × D matrix in MiB.
        loss_reduction: How the loss is reduced over examples, see `curvature.measure`.
        **fields: See `JointFields`.

    Example:
        >>> import torch
        >>> model, x, y = nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = FullVON(model, lr=1.0, betas=(0.0, 0.0), num_data=4)
        >>> with opt.sampled_params():
        ...     nn.functional.mse_loss(model(x), y).backward()
        >>> opt.step()
        >>> opt.posterior().precision.shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        loss_reduction: LossReduction = "auto",
        **fields: Unpack[JointFields],
    ) -> None:
        params = _checked_params(model, limit_mib)
        super().__init__(model, FullCovariance(params), HessianEstimator(model, params, loss_reduction), fields)


@final
class VONG(JointOptimizer[FullGaussian]):
    """Variational online Gauss-Newton with the full empirical Fisher (Khan et al. 2017, https://arxiv.org/abs/1712.01038).

    Args:
        model: A model of linear layers and convolutions without groups.
        limit_mib: Maximum memory of one D × D matrix in MiB.
        loss_reduction: How the loss is reduced over examples, see `curvature.measure`.
        **fields: See `JointFields`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        loss_reduction: LossReduction = "auto",
        **fields: Unpack[JointFields],
    ) -> None:
        params = _checked_params(model, limit_mib)
        estimator = OuterProductEstimator(
            model, params, "VONG", fisher="empirical", likelihood=None, loss_reduction=loss_reduction
        )
        super().__init__(model, FullCovariance(params), estimator, fields)


@final
class NNGFull(JointOptimizer[FullGaussian]):
    """Noisy natural gradient with the full Fisher (NNG-full, Zhang et al. 2018, eqs. 9-10, https://arxiv.org/abs/1712.02390).

    Args:
        model: A model of linear layers and convolutions without groups.
        limit_mib: Maximum memory of one D × D matrix in MiB.
        likelihood: Likelihood to sample labels from; None uses the model's attribute ``likelihood``.
        loss_reduction: How the loss is reduced over examples, see `curvature.measure`.
        **fields: See `JointFields`.
    """

    draws_labels = True

    def __init__(
        self,
        model: nn.Module,
        *,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        likelihood: Likelihood | None = None,
        loss_reduction: LossReduction = "auto",
        **fields: Unpack[JointFields],
    ) -> None:
        params = _checked_params(model, limit_mib)
        estimator = OuterProductEstimator(
            model, params, "NNGFull", fisher="sampled", likelihood=likelihood, loss_reduction=loss_reduction
        )
        super().__init__(model, FullCovariance(params), estimator, fields)


def _checked_params(model: nn.Module, limit_mib: float) -> list[nn.Parameter]:
    """Return the trainable parameters, and raise an error if their D × D matrix exceeds the memory limit."""
    check_full_size({name: param for name, param in model.named_parameters() if param.requires_grad}, limit_mib)
    return trainable(model)
