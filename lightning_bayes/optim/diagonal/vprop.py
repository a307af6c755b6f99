"""Variational RMSprop (Vprop), in the workshop and the conference paper's versions, which have different posteriors.

    Khan et al. 2017, https://arxiv.org/abs/1712.01038      scaling="sum"
    Khan et al. 2018, eq. 14, https://arxiv.org/abs/1806.04854      scaling="mean"

In this package's parametrisation, with ĝ the gradient of the batch's mean loss at θ ~ N(μ, (τ/Ñ) / (s + δ̃)), δ̃ = τδ/Ñ:

    mean:   ĥ = ĝ²              c = √s
    sum:    ĥ = (Ñ/τ) ĝ²        c = s
    m ← β₁ m + (1-β₁)(ĝ + δ̃ μ)
    s ← β₂ s + (1-β₂) ĥ
    μ ← μ - α m̂ / (c + δ̃ + γ)                      the new s; m̂ = m / (1-β₁ᵗ)

β₁ = 0, the default, is the papers' Vprop; β₁ > 0 is eqs. 86-87 of the second paper. `Vprop` with K = `mc_samples` is
Vprop-K. `Vprop0` evaluates gradients at μ: with scaling="mean" it is RMSprop with ε = δ̃ + γ and the prior's gradient.

The first paper uses the gradient G = Ñĝ of the **sum** and one rate, α = 1-β₂: s' ← β₂ s' + (1-β₂) G², μ ← μ - α (G +
δμ) / (s' + δ), 1/Σ = s' + δ. These are the equations above with s = s'/Ñ (and, with a KL weight, for the likelihood to
the power 1/τ). The fixed points of the precision are

    mean:   1/Σ = δ + (Ñ/τ) E[ĝ²]           about right with batches of one example, too small with more
    sum:    1/Σ = δ + (Ñ/τ)² E[ĝ²]          about right with all data in one batch, about N/M times too large with M examples

because E_q[G²] = E_q[∇²f] if q is the posterior itself; see `optim.diagonal.batch_square` for ĝ².
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, cast, final, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.optim.diagonal.batch_square import BatchSquare
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.state import MeanFieldState, average, with_prior
from lightning_bayes.optim.hyperparameters import VariationalArguments
from lightning_bayes.optim.settings import Setting, choice
from lightning_bayes.optim.variational import VariationalOptimizer

Scaling: TypeAlias = Literal["mean", "sum"]

WITHOUT_MOMENTUM = {"betas": (0.0, 0.999)}  # as in the papers


def update(
    state: MeanFieldState,
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood, averaged over samples
    curvature: Tensor,  # ĥ, either ĝ² or (Ñ/τ) ĝ², averaged over samples
    *,
    lr: float,  # α
    betas: tuple[float, float],  # (β₁, β₂), weights of the old momentum and the old curvature
    prior: float | Tensor,  # δ̃ = τδ/Ñ
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
    scaling: Scaling = "mean",  # "mean" divides by √s, "sum" by s
) -> MeanFieldState:
    """One Vprop update of one parameter; pure."""
    new_curvature = average(state.curvature, curvature, betas[1])
    momentum = average(state.momentum, with_prior(grad, state.mean, prior), betas[0])
    scale = (new_curvature.sqrt() if scaling == "mean" else new_curvature) + (prior + damping)
    mean = torch.addcdiv(state.mean, momentum, scale, value=-lr / (1 - betas[0] ** step))
    return MeanFieldState(mean, new_curvature, momentum)


class VpropOwn(TypedDict, total=False):
    """Arguments that only `Vprop` and `Vprop0` have.

    Attributes:
        scaling: Scale of the squared gradients, ``"mean"`` (Khan et al. 2018) or ``"sum"`` (Khan et al. 2017, all data in
            one batch).
            Default: ``"mean"``.
    """

    scaling: Annotated[Scaling, Setting(choice(*get_args(Scaling)), "mean")]


class VpropArguments(VariationalArguments, VpropOwn, total=False):
    """Keyword arguments of `Vprop` and `Vprop0`."""


@final
class Vprop(VariationalOptimizer):
    """Vprop as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer` and `VpropOwn`.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = Vprop(model, lr=0.1, num_data=100, mc_samples=2)  # Vprop-2
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(model(x), y)
        ...     loss.backward()
        ...     return loss
        >>> bool(opt.step(closure) > 0), sorted(opt.posterior().mean)
        (True, ['bias', 'weight'])
    """

    noisy = averages_curvature = amortises = True
    family_type = DiagonalFamily
    estimator = BatchSquare()
    natural_update = staticmethod(update)
    own_arguments = VpropOwn
    own_defaults = WITHOUT_MOMENTUM

    def __init__(self, model: nn.Module, params: Iterable[Any] | None = None, **fields: Unpack[VpropArguments]) -> None:
        super().__init__(model, params, **cast(VariationalArguments, fields))


@final
class Vprop0(VariationalOptimizer):
    """Vprop-0, without noise: it evaluates gradients at the mean and has no posterior; arguments as in `Vprop`.

    Noise arguments have no effect.
    """

    noisy = False
    family_type = DiagonalFamily
    averages_curvature = amortises = True
    default_step = "trust_region"  # with the user's own step nothing of Vprop-0 would remain
    estimator = BatchSquare()
    natural_update = staticmethod(update)
    own_arguments = VpropOwn
    own_defaults = WITHOUT_MOMENTUM

    def __init__(self, model: nn.Module, params: Iterable[Any] | None = None, **fields: Unpack[VpropArguments]) -> None:
        super().__init__(model, params, **cast(VariationalArguments, fields))
