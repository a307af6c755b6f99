"""Variational AdaGrad (VadaGrad): from inference to optimization, Khan et al. 2018, §5, https://arxiv.org/abs/1806.04854.

The bound with a temperature τ, E_q[Nf] + τ KL(q ‖ p), is variational inference at τ = 1 and variational *optimization*
at τ = 0, where q is a contracting search distribution and not a posterior. The natural-gradient update of the precision
P = 1/Σ is

    P ← (1 - τβ) P + β (E_q[∇²Nf] + τδ)

With P = Ñ (s + δ̃) and δ̃ = δ/Ñ, as elsewhere in this package, δ cancels. Eq. 24, with β = 1-β₂ and ĝ² for the Hessian,
becomes

    s ← (1 - τ(1-β₂)) s + (1-β₂) ĝ²                θ ~ N(μ, 1 / (Ñ (s + δ̃)))
    m ← β₁ m + (1-β₁)(ĝ + τδ̃ μ)                    m̂ = m / (1-β₁ᵗ); β₁ = 0, the default, is the paper's
    μ ← μ - α m̂ / (√(s + (1-τ)δ̃) + τδ̃ + γ)

τ = 1 is Vprop with scaling="mean" (eq. 14; with β₁ > 0 it is Vadam without the bias correction of s). τ = 0 is VadaGrad
(eq. 96), whose s is s + δ̃ = P/Ñ here: AdaGrad with the initial accumulator P₀/Ñ if β₂ = 0. The prior then enters only
through this initial value, so set ``init_precision``. For τ in between, s → h/τ, so that P → Ñh/τ + δ is the exact
tempered posterior; the paper's s + τδ̃ instead of s + δ̃ agrees only at both ends. To anneal inference into
optimization (App. L, Fig. 7), pass a schedule from 1 to 0 as `temperature`.

The temperature acts as the KL weight and also decays the old s, so ``kl_weight`` must remain 1. ĝ² is not a Hessian:
the width of q depends on the batch size, see `optim.diagonal.batch_square`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypedDict, cast, final

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.diagonal.batch_square import BatchSquare
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.state import MeanFieldState, average, with_prior
from lightning_bayes.optim.hyperparameters import Number, VariationalArguments
from lightning_bayes.optim.settings import FRACTION, Setting
from lightning_bayes.optim.variational import VariationalOptimizer


def faded_curvature(curvature: Tensor, squared_grad: Tensor, rate: float, temperature: float) -> Tensor:
    """Return the new s, (1 - τβ) s + β ĝ²; pure."""
    return curvature.mul(1 - temperature * rate).add_(squared_grad, alpha=rate)


def update(
    state: MeanFieldState,
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood, averaged over samples
    squared_grad: Tensor,  # ĝ², averaged over samples
    *,
    lr: float,  # α
    betas: tuple[float, float],  # (β₁, β₂); β₁ is the weight of the old momentum, 1-β₂ the weight of ĝ²
    prior: float | Tensor,  # τδ̃, weight of the prior in the bound
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
    temperature: float = 1.0,  # τ
    full_prior: float | Tensor,  # δ̃ = δ/Ñ, the prior's part of the precision
) -> MeanFieldState:
    """One VadaGrad update of one parameter; pure."""
    curvature = faded_curvature(state.curvature, squared_grad, 1 - betas[1], temperature)
    momentum = average(state.momentum, with_prior(grad, state.mean, prior), betas[0])
    scale = (curvature + (full_prior - prior)).sqrt_().add_(prior + damping)
    mean = torch.addcdiv(state.mean, momentum, scale, value=-lr / (1 - betas[0] ** step))
    return MeanFieldState(mean, curvature, momentum)


class VadaGradOwn(TypedDict, total=False):
    """Arguments that only VadaGrad has; its ``kl_weight`` must be 1.

    Attributes:
        temperature: τ, from 1 (variational inference) to 0 (variational optimization, where the noise vanishes and leaves no
            posterior). May be a schedule. Default: 0.
    """

    temperature: Annotated[Number, Setting(FRACTION, 0.0, schedulable=True)]


class VadaGradArguments(VariationalArguments, VadaGradOwn, total=False):
    """Keyword arguments of `VadaGrad`."""


@final
class VadaGrad(VariationalOptimizer):
    """VadaGrad as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer` and `VadaGradOwn`.

    Example:
        >>> import torch
        >>> from lightning_bayes.optim import LinearSchedule
        >>> model, x, y = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> annealed = LinearSchedule(1.0, 0.0, steps=2)
        >>> opt = VadaGrad(model, lr=0.1, num_data=100, init_precision=100.0, temperature=annealed)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> opt.param_groups[0]["posterior"]["temperature"]
        0.0
    """

    noisy = True
    family_type = DiagonalFamily
    estimator = BatchSquare()
    natural_update = staticmethod(update)
    curvature_update = staticmethod(faded_curvature)
    own_arguments = VadaGradOwn
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": (0.0, 0.999)}  # no momentum, as in the paper

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **arguments: Unpack[VadaGradArguments]
    ) -> None:
        super().__init__(model, params, **cast(VariationalArguments, arguments))

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> None:
        """Also require a KL weight of 1 without warm-up."""
        super().check_together(values)
        required = {"kl_weight": 1, "kl_warmup_steps": 0}
        wrong = [f"{name}={values[name]!r}" for name, value in required.items() if values.get(name, value) != value]
        if wrong:
            raise HyperparameterError(
                f"VadaGrad has {' and '.join(wrong)}, but its temperature is the weight of the KL term. Leave kl_weight=1 "
                "and kl_warmup_steps=0, and pass temperature=..., a number or a function of the step."
            )

    def update_arguments(self, group: dict[str, Any], step: int, precision: Tensor | None = None) -> dict[str, Any]:
        """Add the temperature of the prior."""
        arguments = super().update_arguments(group, step, precision)
        full_prior = arguments["prior"]
        return {**arguments, "prior": group["posterior"]["temperature"] * full_prior, "full_prior": full_prior}
