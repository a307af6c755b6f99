"""Noisy natural gradients with a full covariance for small models: `FullVON`, `VONG` and `NNGFull`.

In terms of the flattened weights,

    θ = μ + √(τ/Ñ) L⁻ᵀ ε           L Lᵀ = S + δ̃ I [+ γ I], with the old S
    S ← β₂ S + (1-β₂) Ĥ
    m ← β₁ m + (1-β₁)(ĝ + δ̃ μ)     m̂ = m / (1-β₁ᵗ)
    μ ← μ - α (S + (δ̃+γ) I)⁻¹ m̂    with the new S

The choice of Ĥ determines the algorithm:

- the Hessian of the mean negative log-likelihood: VON (Khan et al. 2018, eqs. 7-9, https://arxiv.org/abs/1806.04854); with
  α = 1-β₂ and β₁ = 0 it is conjugate-computation variational inference (CVI, Khan & Lin 2017);
- the mean of g_i g_iᵀ with the data's labels, the empirical Fisher: VONG (Khan et al. 2017);
- the mean of g_i g_iᵀ with labels sampled from the model, the Fisher: NNG-full (Zhang et al. 2018, eqs. 9-10).

S is factorised in every pass and every update, which limits D to a few thousand weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.likelihood import OutputLikelihood
from lightning_bayes.linalg import cholesky, inverse_root
from lightning_bayes.linalg.factors import add_to_diagonal
from lightning_bayes.optim.dense.measurements import HessianMeasurement, OuterProducts
from lightning_bayes.optim.dense.shell import DenseOptimizer, JointState, reduction_of
from lightning_bayes.optim.diagonal.state import average, debiased
from lightning_bayes.optim.effective import Effective
from lightning_bayes.optim.hyperparameters import OptimizerFields
from lightning_bayes.optim.parameters import trainable
from lightning_bayes.posteriors import FullGaussian, check_full_size, initial_curvature
from lightning_bayes.posteriors.base import DEFAULT_LIMIT_MIB

_NAME = "curvature with prior and damping"


class FullState(NamedTuple):
    """State of all weights as one vector; leading dimensions are independent models."""

    mean: Tensor  # μ, [..., D]
    curvature: Tensor  # S, [..., D, D], of the mean negative log-likelihood, prior not included
    momentum: Tensor  # m, [..., D]


def sample(
    state: FullState,  # before this update's measurement
    noise: Tensor,  # ε, standard normal, [..., D]
    *,
    num_data: float,  # Ñ = ρN
    prior: float,  # δ̃ = τδ/Ñ
    kl_weight: float = 1.0,  # τ
    damping: float = 0.0,  # γ if it is part of the noise, else 0
) -> Tensor:
    """Draw a posterior sample of the weights, ``[..., D]``."""
    root = inverse_root(add_to_diagonal(state.curvature, prior + damping), _NAME)
    return state.mean + math.sqrt(kl_weight / num_data) * (root @ noise[..., None])[..., 0]


def update(
    state: FullState,
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood at the sample, [..., D]
    curvature: Tensor,  # Ĥ at the sample, [..., D, D]
    *,
    lr: float,  # α
    betas: tuple[float, float],  # (β₁, β₂), weights of the old momentum and the old curvature
    prior: float,  # δ̃
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
) -> FullState:
    """One update; pure."""
    new_curvature = average(state.curvature, curvature, betas[1])
    momentum = average(state.momentum, grad + prior * state.mean, betas[0])
    factor = cholesky(add_to_diagonal(new_curvature, prior + damping), _NAME)
    direction = torch.cholesky_solve(debiased(momentum, betas[0], step)[..., None], factor)[..., 0]
    return FullState(state.mean - lr * direction, new_curvature, momentum)


@final
class FullCovariance:
    """`sample`, `update` and posterior on tensors in the order of the parameters; see `optim.dense.shell.Equations`."""

    def __init__(self, model: nn.Module, limit_mib: float) -> None:
        check_full_size({name: param for name, param in model.named_parameters() if param.requires_grad}, limit_mib)
        self.params, self.names = trainable(model), ["joint_curvature"]

    def initial(self, init_precision: float, hyper: Effective) -> list[Tensor]:
        """A multiple of I."""
        size = sum(param.numel() for param in self.params)
        zero = self.params[0].new_zeros(size, size)
        return [add_to_diagonal(zero, initial_curvature(init_precision, **hyper.start_arguments))]

    def sample(self, curvature: list[Tensor], noise: list[Tensor], hyper: Effective) -> list[Tensor]:
        """Draw weights."""
        mean = _flat(self.params)
        weights = sample(
            FullState(mean, curvature[0], torch.zeros_like(mean)),
            _flat(noise),
            num_data=hyper.num_data,
            prior=hyper.prior,
            kl_weight=hyper.kl_weight,
            damping=hyper.noise_damping,
        )
        return self._parts(weights)

    def update(self, old: JointState, grads: list[Tensor], measured: list[Tensor], **numbers: Any) -> JointState:
        """Update the flat vectors."""
        state = FullState(_flat(old.means), old.curvature[0], _flat(old.momenta))
        new = update(state, _flat(grads), measured[0], **numbers)
        return JointState(self._parts(new.mean), self._parts(new.momentum), [new.curvature])

    def posterior(self, curvature: list[Tensor], hyper: Effective, **shared: Any) -> FullGaussian:
        """Precision (Ñ/τ)(S + (δ̃ [+ γ]) I)."""
        damped = add_to_diagonal(curvature[0], hyper.noise_damping + hyper.prior)
        return FullGaussian(precision=damped * hyper.scale, **shared)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [param.numel() for param in self.params])
        return [part.view_as(param) for part, param in zip(parts, self.params, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@final
class FullVON(DenseOptimizer):
    """Variational online Newton with the full Hessian (Khan et al. 2018, eqs. 7-9), as a `torch.optim.Optimizer`.

    The Hessian requires one backward pass per weight. If its negative eigenvalues outweigh the prior, no posterior exists,
    and the error suggests a larger ``prior_precision``, or ``damping`` with ``damping_in_noise=True``. With
    ``betas=(0, 1 - lr)`` the algorithm is CVI.

    Args:
        model: Any twice differentiable model.
        limit_mib: Maximum memory of one D × D matrix in MiB.
        **arguments: See `DenseOptimizer`.

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
        **arguments: Unpack[OptimizerFields],
    ) -> None:
        equations = FullCovariance(model, limit_mib)
        measurement = HessianMeasurement(model, equations.params, reduction_of(arguments))
        super().__init__(model, equations, measurement, arguments)


@final
class VONG(DenseOptimizer):
    """Variational online Gauss-Newton with the full empirical Fisher (Khan et al. 2017, https://arxiv.org/abs/1712.01038).

    Args:
        model: A model of linear layers and convolutions without groups.
        limit_mib: Maximum memory of one D × D matrix in MiB.
        **arguments: See `DenseOptimizer`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        **arguments: Unpack[OptimizerFields],
    ) -> None:
        equations = FullCovariance(model, limit_mib)
        measurement = OuterProducts(model, equations.params, "VONG", "empirical", None, reduction_of(arguments))
        super().__init__(model, equations, measurement, arguments)


@final
class NNGFull(DenseOptimizer):
    """Noisy natural gradient with the full Fisher (NNG-full, Zhang et al. 2018, eqs. 9-10, https://arxiv.org/abs/1712.02390).

    Args:
        model: A model of linear layers and convolutions without groups.
        limit_mib: Maximum memory of one D × D matrix in MiB.
        likelihood: Likelihood to sample labels from; None uses the model's attribute ``lightning_bayes_likelihood``.
        **arguments: See `DenseOptimizer`.
    """

    draws_labels = True

    def __init__(
        self,
        model: nn.Module,
        *,
        limit_mib: float = DEFAULT_LIMIT_MIB,
        likelihood: OutputLikelihood | None = None,
        **arguments: Unpack[OptimizerFields],
    ) -> None:
        equations = FullCovariance(model, limit_mib)
        measurement = OuterProducts(model, equations.params, "NNGFull", "sampled", likelihood, reduction_of(arguments))
        super().__init__(model, equations, measurement, arguments)
