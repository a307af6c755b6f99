"""VON with natural momentum, Khan et al. 2018, eqs. 18-19 and 82-83, https://arxiv.org/abs/1806.04854.

Polyak's heavy-ball method, with the distance between parameters replaced by a distance between posteriors:

    s_{t+1} = s_t + β (ĥ - s_t)                                                    β = 1-β₂, as in `optim.diagonal.von`
    μ_{t+1} = μ_t - α (ĝ + δ̃ μ_t) / (s_{t+1} + δ̃ + γ)
                  + β₁ (s_t + δ̃ + γ) / (s_{t+1} + δ̃ + γ) · (μ_t - μ_{t-1})

Khan et al. use one rate, ᾱ = α = β, and write γ̄ for β₁; their mirror-descent rates (β_t, α_t) give ᾱ = β_t / (1-α_t) and
γ̄ = α_t / (1-α_t). The long-run rate of the mean is α / (1-β₁).

With a constant α this is the raw momentum M ← β₁ M + ĝ + δ̃ μ, μ ← μ - α M / (s + δ̃ + γ) of Osawa et al. 2019, because
(s_t + δ̃ + γ)(μ_t - μ_{t-1}) = -α M. With Adam's step sizes (eq. 66), α (1-β₁) / (1-β₁ᵗ) and β₁ (1-β₁ᵗ⁻¹) / (1-β₁ᵗ), it is
`VON` with its bias-corrected average. It differs from both if steps are modified, as by a trust region.
"""

from __future__ import annotations

from typing import NamedTuple, final

from torch import Tensor

from lightning_bayes.optim.diagonal.estimators import SecondOrder
from lightning_bayes.optim.diagonal.state import average
from lightning_bayes.optim.diagonal.von import NewtonMethod, Positivity, moved_curvature
from lightning_bayes.optim.variational import VariationalOptimizer


class MomentumVONState(NamedTuple):
    """State of one parameter; all tensors have its shape."""

    mean: Tensor  # μ_t
    curvature: Tensor  # s_t
    momentum: Tensor  # running average of the gradient, used only by the trust region around SGD's step
    previous_mean: Tensor  # μ_{t-1}, meaningless before the first update


def update(
    state: MomentumVONState,
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood at the sample
    hessian: Tensor,  # ĥ, the diagonal of its Hessian
    *,
    lr: float,  # α
    betas: tuple[float, float],  # (β₁, β₂), weights of the previous step and of the old curvature
    prior: float | Tensor,  # δ̃ = τδ/Ñ
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1; the first update has no previous step
    positivity: Positivity = "backtracking",  # how s + δ̃ stays positive
) -> MomentumVONState:
    """One update of one parameter; pure."""
    curvature = moved_curvature(state.curvature, hessian, 1 - betas[1], prior, positivity)
    gradient = grad + prior * state.mean
    force = -lr * gradient
    if step > 1:
        force = force + betas[0] * (state.curvature + (prior + damping)) * (state.mean - state.previous_mean)
    mean = state.mean + force / (curvature + (prior + damping))
    return MomentumVONState(mean, curvature, average(state.momentum, gradient, betas[0]), state.mean)


@final
class MomentumVON(NewtonMethod, VariationalOptimizer):
    """VON with natural momentum and the exact diagonal of the Hessian; arguments as in `NewtonOwn`."""

    estimator = SecondOrder("diag_hessian")
    state_type = MomentumVONState
    natural_update = staticmethod(update)
