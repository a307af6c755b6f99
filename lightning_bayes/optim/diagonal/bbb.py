"""Bayes by Backprop (BBB), Blundell et al. 2015, https://arxiv.org/abs/1505.05424: Adam on the bound's pathwise gradient.

With θ = μ + σε and δ̃ = τδ/Ñ, the bound per example F = E_ε[f(θ)] + (τ/Ñ) KL(N(μ, σ²) ‖ N(0, 1/δ)) has the gradients

    ∂F/∂μ     = E[ĝ] + δ̃ μ
    ∂F/∂log σ = σ E[ĝ ε] + (τ/Ñ)(δσ² - 1) = (τ/Ñ) (ĥ - s) / (s + δ̃)

where ĥ = ĝ ε / σ is what `ReparameterisedVON` measures, and s = (τ/Ñ)/σ² - δ̃ is this package's parametrisation of σ. The
state therefore stores s: decreasing log σ by d multiplies s + δ̃ by exp(2d). Where the posterior is wider than the prior,
s is negative, but above -δ̃. Adam's steps do not depend on the factor τ/Ñ, so with r = (ĥ - s) / (s + δ̃):

    m, v ← averages of ĝ + δ̃ μ and of its square           μ ← μ - α m̂ / (√v̂ + γ + ε)
    n, w ← averages of r and of r²                         log σ ← log σ - α_σ n̂ / (√ŵ + ε)

Blundell et al. write σ = log(1 + e^ρ), about e^ρ where σ ≪ 1. The optimum is the same, and it is VON's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, TypedDict, cast, final

from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.reparameterised import Reparameterised
from lightning_bayes.optim.diagonal.signed_curvature import keep_positive
from lightning_bayes.optim.diagonal.state import average
from lightning_bayes.optim.hyperparameters import Number, VariationalArguments
from lightning_bayes.optim.settings import NOT_NEGATIVE, Setting
from lightning_bayes.optim.variational import VariationalOptimizer

EPSILON = 1e-8  # Adam's ε


class BBBState(NamedTuple):
    """State of one parameter; all tensors have its shape."""

    mean: Tensor  # μ
    curvature: Tensor  # s = (τ/Ñ)/σ² - δ̃
    momentum: Tensor  # m
    mean_square: Tensor  # v
    log_std_momentum: Tensor  # n
    log_std_square: Tensor  # w


def pathwise_gradients(state: BBBState, grad: Tensor, hessian: Tensor, prior: float | Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the bound, ∂F/∂μ and Ñ/τ times ∂F/∂log σ; pure. Arguments as in `update`."""
    return grad + prior * state.mean, (hessian - state.curvature) / (state.curvature + prior)


def update(
    state: BBBState,  # with s above -δ̃
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood, averaged over samples
    hessian: Tensor,  # ĝ ε / σ, averaged over samples
    *,
    lr: float,  # α, Adam's learning rate for μ
    betas: tuple[float, float],  # (β₁, β₂) of Adam
    prior: float | Tensor,  # δ̃ = τδ/Ñ
    damping: float = 0.0,  # γ, added to Adam's ε
    step: int = 1,  # update index t, from 1
    std_lr: float | None = None,  # α_σ, Adam's learning rate for log σ; None for α
    debias: bool = True,  # whether averages of squares start at zero with a constant β₂, and need bias correction
) -> BBBState:
    """One BBB update of one parameter; pure."""
    mean_grad, log_std_grad = pathwise_gradients(state, grad, hessian, prior)
    momentum = average(state.momentum, mean_grad, betas[0])
    log_std_momentum = average(state.log_std_momentum, log_std_grad, betas[0])
    mean_square = average(state.mean_square, mean_grad.square(), betas[1])
    log_std_square = average(state.log_std_square, log_std_grad.square(), betas[1])
    bias1, bias2 = 1 - betas[0] ** step, 1 - betas[1] ** step if debias else 1.0
    mean = state.mean - lr / bias1 * momentum / ((mean_square / bias2).sqrt() + (damping + EPSILON))
    log_std_rate = (lr if std_lr is None else std_lr) / bias1
    log_std_step = log_std_rate * log_std_momentum / ((log_std_square / bias2).sqrt() + EPSILON)
    curvature = keep_positive((state.curvature + prior) * (2 * log_std_step).exp() - prior, prior)
    return BBBState(mean, curvature, momentum, mean_square, log_std_momentum, log_std_square)


class BBBOwn(TypedDict, total=False):
    """Arguments that only Bayes by Backprop has.

    Attributes:
        std_lr: Learning rate of log σ. None: the mean's. A trust region bounds only the step of the mean.
    """

    std_lr: Annotated[Number | None, Setting(NOT_NEGATIVE, upper_limit=1e12, schedulable=True, optional=True)]


class BBBArguments(VariationalArguments, BBBOwn, total=False):
    """Keyword arguments of `BBB`."""


@final
class BBB(VariationalOptimizer):
    """Bayes by Backprop as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer` and `BBBOwn`."""

    noisy = signed_curvature = True
    family_type = DiagonalFamily
    estimator = Reparameterised()
    state_type = BBBState
    own_arguments = BBBOwn
    natural_update = staticmethod(update)

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **arguments: Unpack[BBBArguments]
    ) -> None:
        super().__init__(model, params, **cast(VariationalArguments, arguments))

    def update_arguments(self, group: dict[str, Any], step: int, precision: Tensor | None = None) -> dict[str, Any]:
        """Add the learning rate of σ and the bias correction."""
        arguments = super().update_arguments(group, step, precision)
        if arguments["std_lr"] is None:
            arguments["std_lr"] = arguments["lr"]
        # Steps other than the natural one start with running means of squares, which have no bias.
        return {**arguments, "debias": self.steps[group["posterior"]["step_rule"]].is_published}
