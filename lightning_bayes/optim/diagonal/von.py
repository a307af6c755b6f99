"""Variational online Newton (VON), Khan et al. 2018, eqs. 7-8 and App. D.1, https://arxiv.org/abs/1806.04854.

In this package's parametrisation, with ĝ the mean gradient at θ ~ N(μ, Σ), Σ = (τ/Ñ) / (s + δ̃), δ̃ = τδ/Ñ:

    ĥ = mean_i diag ∇²ℓ_i(θ)                        `VON`: exact, through BackPACK
    ĥ = ĝ (θ - μ) / Σ                               `ReparameterisedVON`: unbiased for E_q[diag ∇²f], but noisy
    s ← s + β (ĥ - s)                               β = 1-β₂
    m ← β₁ m + (1-β₁)(ĝ + δ̃ μ)
    μ ← μ - α m̂ / (s + δ̃ + γ)                       m̂ = m / (1-β₁ᵗ)

Khan et al. use one rate, α = β, and no momentum, β₁ = 0. With exact expectations the fixed point is the optimum of the
mean-field bound: 1/Σ = (Ñ/τ) E_q[diag ∇²f] + δ. ĥ may be negative, but s + δ̃ must stay positive:

    "backtracking"   β = min(1-β₂, ½ (s + δ̃) / (s - ĥ)) where ĥ < 0
    "correction"     s ← s + β (ĥ - s) + ½ β² (ĥ - s)² / (s + δ̃)      Lin et al. 2020, https://arxiv.org/abs/2002.10060

With backtracking a negative ĥ at most halves s + δ̃; with the correction any ĥ at most halves it. The backtracking
follows App. D.1 with three repairs: the bound printed there, s/|ĥ|, applies to s + βĥ and not to (1-β)s + βĥ; s + δ̃
must stay positive, not s; and each weight has its own rate. It shortens updates for negative ĥ only, so noise in ĥ
biases s upwards. The bias of the correction is of second order in β.

For a network of linear layers, ReLU and max-pooling, the Hessian and the Gauss-Newton matrix have the same
diagonal, because the output is piecewise linear in each single weight. It can be negative only with curved activations
such as tanh.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict, cast, final, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.optim.diagonal.estimators import SecondOrder
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.reparameterised import Reparameterised
from lightning_bayes.optim.diagonal.signed_curvature import keep_positive, keep_positive_
from lightning_bayes.optim.diagonal.state import MeanFieldState, average, with_prior
from lightning_bayes.optim.hyperparameters import DeclaresArguments, VariationalArguments
from lightning_bayes.optim.settings import Setting, choice
from lightning_bayes.optim.variational import VariationalOptimizer

Positivity: TypeAlias = Literal["backtracking", "correction"]


def moved_curvature(
    curvature: Tensor, hessian: Tensor, rate: float, prior: float | Tensor, positivity: Positivity
) -> Tensor:
    """Move s towards ĥ at the rate β, and keep s + δ̃ positive; pure. An s at or below -δ̃ counts as its magnitude."""
    start = torch.where(curvature > -prior, curvature, curvature.abs())
    if positivity == "correction":
        return correct_(start, hessian.clone(), rate, prior)
    gap, precision = hessian - start, start + prior
    halving_rate = 0.5 * precision / gap.neg().clamp_min(torch.finfo(gap.dtype).tiny)
    return keep_positive(start + gap * torch.where(hessian < 0, halving_rate.clamp_max(rate), rate), prior)


def correct_(curvature: Tensor, hessian: Tensor, rate: float, prior: float | Tensor) -> Tensor:
    """`moved_curvature` with the correction of Lin et al. 2020, in place, for s above -δ̃; `hessian` is overwritten."""
    gap, precision = hessian.sub_(curvature), curvature + prior
    curvature.add_(gap, alpha=rate).addcdiv_(gap.square_(), precision, value=rate**2 / 2)
    return keep_positive_(curvature, prior)


def update(
    state: MeanFieldState,
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood at the sample
    hessian: Tensor,  # ĥ, the diagonal of its Hessian or an estimate
    *,
    lr: float,  # α
    betas: tuple[float, float],  # (β₁, β₂), weights of the old momentum and the old curvature
    prior: float | Tensor,  # δ̃ = τδ/Ñ
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
    positivity: Positivity = "backtracking",  # how s + δ̃ stays positive
) -> MeanFieldState:
    """One VON update of one parameter; pure."""
    curvature = moved_curvature(state.curvature, hessian, 1 - betas[1], prior, positivity)
    momentum = average(state.momentum, with_prior(grad, state.mean, prior), betas[0])
    mean = torch.addcdiv(state.mean, momentum, curvature + (prior + damping), value=-lr / (1 - betas[0] ** step))
    return MeanFieldState(mean, curvature, momentum)


class NewtonOwn(TypedDict, total=False):
    """Arguments that only VON and its variants have.

    Attributes:
        positivity: How the precision stays positive: ``"backtracking"`` or ``"correction"``, see `optim.diagonal.von`.
            Default: ``"backtracking"``.
    """

    positivity: Annotated[Positivity, Setting(choice(*get_args(Positivity)), "backtracking")]


class NewtonArguments(VariationalArguments, NewtonOwn, total=False):
    """Keyword arguments of VON and its variants."""


class NewtonMethod(DeclaresArguments, ABC):
    """What VON and its variants have in common; their next base is `VariationalOptimizer`."""

    noisy = signed_curvature = True
    family_type = DiagonalFamily
    own_arguments = NewtonOwn
    curvature_update: ClassVar[Callable[..., Tensor] | None] = staticmethod(moved_curvature)

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **fields: Unpack[NewtonArguments]
    ) -> None:
        super().__init__(model, params, **cast(VariationalArguments, fields))  # type: ignore[call-arg, misc]


@final
class VON(NewtonMethod, VariationalOptimizer):
    """VON with the exact diagonal of the Hessian, as a `torch.optim.Optimizer`; arguments as in `NewtonOwn`.

    BackPACK computes the diagonal; the argument ``engine`` has no effect. Models with layers, activations or losses that
    BackPACK does not support are refused before the first step.
    """

    amortises = True
    estimator = SecondOrder("diag_hessian")
    natural_update = staticmethod(update)


@final
class ReparameterisedVON(NewtonMethod, VariationalOptimizer):
    """VON with the Hessian's diagonal estimated from gradient and noise, for any model; arguments as in `NewtonOwn`.

    It costs as much as Adam. The variance of the estimate grows as the posterior narrows, so keep β₂ close to 1.
    """

    estimator = Reparameterised()
    natural_update = staticmethod(update)
