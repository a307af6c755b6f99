"""Improved variational online Newton (IVON), Shen et al. 2024, Algorithm 1, https://arxiv.org/abs/2402.17641.

In this package's parametrisation, with ĝ the gradient of the batch's mean loss at θ ~ N(μ, Σ), Σ = (τ/Ñ) / (s + δ̃),
δ̃ = τδ/Ñ:

    ĥ = ĝ (θ - μ) / Σ                                                  E_q[ĥ] = E_q[diag ∇²f], Price's theorem
    m ← β₁ m + (1-β₁) ĝ                                                prior's gradient not included
    s ← β₂ s + (1-β₂) ĥ + ½ (1-β₂)² (s - ĥ)² / (s + δ̃)                 no bias correction
    μ ← μ - α clip((m̂ + δ̃ μ) / (s + δ̃ + γ), ±ξ)                        m̂ = m / (1-β₁ᵗ)

One backward pass is enough, through any layer, but a single ĥ is very noisy and may be negative. The quadratic term,
from Lin et al. 2020, keeps s + δ̃ above half of its previous value for every ĥ: with x = (1-β₂)(ĥ - s) / (s + δ̃),

    s_new + δ̃ = (s + δ̃)(1 + x + x²/2) = (s + δ̃)(1 + (1+x)²) / 2.

Shen et al. write h for s, λ for Ñ/τ and δ for δ̃, their weight decay. β₂ is close to 1 (0.99999) to average out the
noise. Their h₀ is s₀ = τ(P₀ - δ)/Ñ, where P₀ is ``init_precision``. Without ``init_precision`` the natural step chooses
P₀ and rescales α (`optim.diagonal.ivon_start`). Otherwise the first pass has no noise, and s₀ = M ĝ² (M examples), which
would be the empirical Fisher if gradients were independent with mean zero. Both are heuristics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypedDict, cast, final

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.ivon_start import starting_precision
from lightning_bayes.optim.diagonal.reparameterised import Reparameterised
from lightning_bayes.optim.diagonal.state import MeanFieldState, average, debiased, with_prior
from lightning_bayes.optim.diagonal.von import correct_, moved_curvature
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.hyperparameters import Number, VariationalArguments
from lightning_bayes.optim.settings import POSITIVE_OR_INFINITE, Setting
from lightning_bayes.optim.variational import VariationalOptimizer
from lightning_bayes.posteriors import minimal_precision


def update(
    state: MeanFieldState,  # with s + δ̃ > 0, before and after the update
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood at the sample
    hessian: Tensor,  # ĥ, estimate of the Hessian's diagonal, of any sign
    *,
    lr: float,  # α
    betas: tuple[float, float],  # (β₁, β₂), weights of the old momentum and the old curvature
    prior: float | Tensor,  # δ̃ = τδ/Ñ, above 0
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
    clip_radius: float = math.inf,  # ξ, bound on each component of the step before multiplication by α
) -> MeanFieldState:
    """One IVON update of one parameter; pure."""
    curvature = moved_curvature(state.curvature, hessian, 1 - betas[1], prior, "correction")
    momentum = average(state.momentum, grad, betas[0])
    gradient = with_prior(debiased(momentum, betas[0], step), state.mean, prior)
    direction = gradient.div_(curvature + (prior + damping)).clamp_(-clip_radius, clip_radius)
    return MeanFieldState(torch.add(state.mean, direction, alpha=-lr), curvature, momentum)


class IVONOwn(TypedDict, total=False):
    """Arguments that only IVON has.

    Attributes:
        clip_radius: ξ, bound of each component of the natural step, before the learning rate is applied. Default: no bound.
        rescale_lr: Whether to multiply an explicit learning rate by the initial s₀ + δ̃ = τP₀/Ñ, which makes it comparable to
            SGD's: the default of the authors' code. Requires the natural step. None: True if the natural step has no
            ``init_precision``, which is then chosen too, see `optim.diagonal.ivon_start`; else False. False without one
            starts at the square of the first gradient.
    """

    clip_radius: Annotated[Number, Setting(POSITIVE_OR_INFINITE, math.inf, schedulable=True)]
    rescale_lr: Annotated[bool | None, Setting()]


class IVONArguments(VariationalArguments, IVONOwn, total=False):
    """Keyword arguments of `IVON`."""


@final
class IVON(VariationalOptimizer):
    """IVON as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer` and `IVONOwn`.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = IVON(model, lr=0.1, num_data=100, prior_precision=1.0, init_precision=50.0, rescale_lr=True)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> bool((opt.posterior().precision["weight"] > 0).all())
        True
    """

    noisy = signed_curvature = True
    family_type = DiagonalFamily
    natural_update = staticmethod(update)
    curvature_update = staticmethod(correct_)  # s starts at M ĝ² or at s₀, both at least 0
    estimator = Reparameterised()
    own_arguments = IVONOwn
    own_defaults: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.99999)}  # β₂ close to 1 averages the noisy ĥ
    # Present from the start, because torch.distributed.checkpoint only loads into existing keys.
    group_state: ClassVar[Mapping[str, Any]] = {"rate_factor": None}

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None = None, **arguments: Unpack[IVONArguments]
    ) -> None:
        is_natural = arguments.get("base") is None and arguments.get("step_rule", "natural") == "natural"
        rescales = arguments.get("rescale_lr")
        starts_by_itself = is_natural and rescales is not False and arguments.get("init_precision") is None
        self._likelihood_precision = starting_precision(model) if starts_by_itself else None
        if starts_by_itself:
            # `start_groups` adds the prior's, once it is known.
            arguments["init_precision"] = self._likelihood_precision
        arguments["rescale_lr"] = starts_by_itself if rescales is None else rescales
        super().__init__(model, params, **cast(VariationalArguments, arguments))

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> None:
        """Also refuse ``rescale_lr`` without the natural step."""
        super().check_together(values)
        if values["rescale_lr"] and values.get("step_rule", "natural") != "natural":
            raise HyperparameterError(
                "rescale_lr=True multiplies the learning rate of the natural step by the initial curvature. Pass lr=..., or "
                "set rescale_lr=False."
            )

    def store_initial_values(self, group: dict[str, Any]) -> None:
        """Store s₀ + δ̃ of the start if it rescales the learning rate, so that KL warm-up does not change it."""
        if group["posterior"]["rescale_lr"] and group["posterior"].get("rate_factor") is None:
            initial = effective(group)
            precision = self._likelihood_precision or group["posterior"]["init_precision"]
            group["posterior"]["rate_factor"] = precision * initial.kl_weight / initial.num_data

    def start_groups(self) -> None:
        """Choose P₀ of groups without an update, now that the prior is known."""
        super().start_groups()
        for group in self.param_groups:
            is_known = group["posterior"]["num_data"] is not None  # a callback counts the examples after the first call
            if self._likelihood_precision is not None and is_known and not group["posterior"]["step"]:
                least = minimal_precision(**effective(group).start_arguments)
                group["posterior"]["init_precision"] = self._likelihood_precision + least

    def update_arguments(self, group: dict[str, Any], step: int, precision: Tensor | None = None) -> dict[str, Any]:
        """Rescale the learning rate on request."""
        arguments = super().update_arguments(group, step, precision)
        if group["posterior"]["rescale_lr"]:
            arguments["lr"] *= group["posterior"]["rate_factor"]
        return arguments
