"""Full-covariance optimizers for small models: `FullVON`, `VONG`, `NNGFull`, around `optim.dense.full_gaussian`.

They differ in Ĥ: the exact Hessian; the mean of g_i g_iᵀ with the labels of the data; and with labels that the model draws.
A D × D matrix is kept, factorised for every pass and every update, so D is hundreds or a few thousands.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.curvature import Likelihood, LossReduction
from lightning_bayes.optim.dense.estimators import HessianEstimator, OuterProductEstimator
from lightning_bayes.optim.dense.full_covariance import FullCovariance
from lightning_bayes.optim.dense.joint_optimizer import JointFields, JointOptimizer
from lightning_bayes.optim.runtime.parameters import trainable
from lightning_bayes.posteriors import FullGaussian, check_full_size
from lightning_bayes.posteriors.memory import DEFAULT_LIMIT_MIB


@final
class FullVON(JointOptimizer[Tensor, FullGaussian]):
    """Variational online Newton with the full Hessian (Khan et al. 2018, eqs. 7-9), as a `torch.optim.Optimizer`.

    The Hessian takes one backward pass for each weight. It may have negative eigenvalues, for which there is no posterior:
    the error then asks for a larger ``prior_precision``, or ``damping`` with ``damping_in_noise=True``. With
    ``betas=(0, 1 - lr)`` it is CVI.

    Args:
        model: Any model that torch can differentiate twice.
        limit_mib: Memory in MiB that one D × D matrix may take.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
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
        params = _small_enough(model, limit_mib)
        super().__init__(model, FullCovariance(params), HessianEstimator(model, params, loss_reduction), fields)


@final
class VONG(JointOptimizer[Tensor, FullGaussian]):
    """Variational online Gauss-Newton with the full empirical Fisher (Khan et al. 2017, https://arxiv.org/abs/1712.01038).

    Args:
        model: A model of linear layers and convolutions without groups.
        limit_mib: Memory in MiB that one D × D matrix may take.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
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
        params = _small_enough(model, limit_mib)
        estimator = OuterProductEstimator(
            model, params, "VONG", fisher="empirical", likelihood=None, loss_reduction=loss_reduction
        )
        super().__init__(model, FullCovariance(params), estimator, fields)


@final
class NNGFull(JointOptimizer[Tensor, FullGaussian]):
    """Noisy natural gradient with the full Fisher (NNG-full, Zhang et al. 2018, eqs. 9-10, https://arxiv.org/abs/1712.02390).

    Args:
        model: A model of linear layers and convolutions without groups.
        limit_mib: Memory in MiB that one D × D matrix may take.
        likelihood: Draws the labels; None looks for the model's attribute ``likelihood``.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``, see `curvature.measure`.
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
        params = _small_enough(model, limit_mib)
        estimator = OuterProductEstimator(
            model, params, "NNGFull", fisher="sampled", likelihood=likelihood, loss_reduction=loss_reduction
        )
        super().__init__(model, FullCovariance(params), estimator, fields)


def _small_enough(model: nn.Module, limit_mib: float) -> list[nn.Parameter]:
    """The trainable parameters, if their D × D matrix fits into the limit."""
    check_full_size({name: param for name, param in model.named_parameters() if param.requires_grad}, limit_mib)
    return trainable(model)
