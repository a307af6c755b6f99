"""Block-tridiagonal Noisy K-FAC as an optimizer; `optim.dense.block_tridiagonal` is the algorithm."""

from __future__ import annotations

from typing import final

from torch import nn
from typing_extensions import Unpack

from lightning_bayes.curvature import Likelihood, LossReduction
from lightning_bayes.optim.dense.chain_covariance import ChainCovariance
from lightning_bayes.optim.dense.estimators import ChainFactorsEstimator
from lightning_bayes.optim.dense.joint_optimizer import JointFields, JointOptimizer
from lightning_bayes.optim.fisher import FisherName
from lightning_bayes.optim.runtime.parameters import trainable
from lightning_bayes.posteriors import BlockTridiagonal, linear_chain
from lightning_bayes.posteriors.memory import DEFAULT_LIMIT_MIB


@final
class BlockTridiagonalKFAC(JointOptimizer[BlockTridiagonal]):
    """Noisy K-FAC with correlations between neighbouring layers (Zhang et al. 2018, section 3.5).

    It measures, averages and inverts the factors in every update.

    Args:
        model: A chain of trainable linear layers with element-wise activations in between.
        fisher: ``"sampled"`` samples labels from the likelihood, ``"empirical"`` uses the data's labels. None samples labels
            if there is a likelihood.
        likelihood: The likelihood of the model's outputs; None uses the model's attribute ``likelihood``.
        kl_clip: Bound c on the squared Fisher norm of the step, see `optim.kronecker.kl_clip`; None for no bound.
        limit_mib: Maximum memory of the factors in MiB.
        loss_reduction: How the loss is reduced over examples, see `curvature.measure`.
        **fields: See `JointFields`.

    Example:
        >>> import torch
        >>> model, x, y = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = BlockTridiagonalKFAC(model, lr=0.1, num_data=4)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> [factor.shape for factor in opt.posterior().links["0.weight"]]  # [out, next out], [in + 1, next in + 1]
        [torch.Size([3, 1]), torch.Size([3, 4])]
    """

    needs_chain = True  # a model of linear layers that feed one another

    def __init__(
        self,
        model: nn.Module,
        *,
        fisher: FisherName | None = None,
        likelihood: Likelihood | None = None,
        kl_clip: float | None = None,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        loss_reduction: LossReduction = "auto",
        **fields: Unpack[JointFields],
    ) -> None:
        linear_chain(model, limit_mib)
        params = trainable(model)
        estimator = ChainFactorsEstimator(
            model, params, "BlockTridiagonalKFAC", fisher=fisher, likelihood=likelihood, loss_reduction=loss_reduction
        )
        super().__init__(model, ChainCovariance(params, estimator.layers, kl_clip), estimator, fields)
