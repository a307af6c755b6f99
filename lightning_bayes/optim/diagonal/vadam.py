"""Variational Adam (Vadam), Khan et al. 2018, Fig. 1 and eqs. 88-93, https://arxiv.org/abs/1806.04854.

In this package's parametrisation, with ĝ the gradient of the batch's mean loss at θ ~ N(μ, (τ/Ñ) / (s + δ̃)), δ̃ = τδ/Ñ:

    m ← β₁ m + (1-β₁)(ĝ + δ̃ μ)                     the prior's gradient at the mean
    s ← β₂ s + (1-β₂) ĝ²                           prior not included
    μ ← μ - α m̂ / (√ŝ + δ̃ + γ)                     m̂ = m / (1-β₁ᵗ);  ŝ = s / (1-β₂ᵗ) if s₀ = 0, else s

Without noise and prior this is Adam with ε = γ. Khan et al. write γ₁, γ₂ for β₁, β₂ and λ̃ for δ̃. Their eq. 93 has λ̃
under the root; their Fig. 1, eq. 86 and code have it outside, as here. The noise uses s before the update, without bias
correction.

The paper starts from s₀ = 0, which is ``init_precision=prior_precision``: the first noise is as wide as the prior. With
any other start s contains more than measurements, so ŝ = s here; the authors' code divides by 1-β₂ᵗ nevertheless.

ĝ² is not a Hessian: the posterior's width depends on the batch size, see `optim.diagonal.batch_square`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from lightning_bayes.optim.diagonal.batch_square import BatchSquare
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.state import MeanFieldState, average, with_prior
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.measuring import updates_covered
from lightning_bayes.optim.variational import VariationalOptimizer
from lightning_bayes.posteriors import initial_curvature


def update(
    state: MeanFieldState,
    grad: Tensor,  # ĝ, mean gradient of the negative log-likelihood, averaged over samples
    squared_grad: Tensor,  # ĝ², averaged over samples
    *,
    lr: float,  # α
    betas: tuple[float, float],  # (β₁, β₂), weights of the old momentum and the old curvature
    prior: float | Tensor,  # δ̃ = τδ/Ñ
    damping: float = 0.0,  # γ
    step: int = 1,  # update index t, from 1
    from_zero: bool = False,  # whether s₀ = 0, so that s needs bias correction
    total_weight: float | None = None,  # of the measurements in s; None for 1-β₂ᵗ, if every update has measured
) -> MeanFieldState:
    """One Vadam update of one parameter; pure."""
    curvature = average(state.curvature, squared_grad, betas[1])
    momentum = average(state.momentum, with_prior(grad, state.mean, prior), betas[0])
    if total_weight is None:
        total_weight = 1 - betas[1] ** step
    scale = (curvature / (total_weight if from_zero else 1.0)).sqrt_().add_(prior + damping)
    mean = torch.addcdiv(state.mean, momentum, scale, value=-lr / (1 - betas[0] ** step))
    return MeanFieldState(mean, curvature, momentum)


@final
class Vadam(VariationalOptimizer):
    """Vadam as a `torch.optim.Optimizer`; arguments as in `VariationalOptimizer`.

    Example:
        >>> import torch
        >>> model, x, y = torch.nn.Linear(2, 1), torch.ones(4, 2), torch.zeros(4, 1)
        >>> opt = Vadam(model, lr=0.1, num_data=100, prior_precision=10.0, init_precision=10.0)
        >>> for _ in range(3):
        ...     with opt.sampled_params():
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     opt.step()
        >>> sorted(opt.posterior().mean)
        ['bias', 'weight']
    """

    noisy = True
    family_type = DiagonalFamily
    estimator = BatchSquare()
    averages_curvature = amortises = True
    natural_update = staticmethod(update)
    # Present from the start, because torch.distributed.checkpoint only loads into existing keys.
    group_state: ClassVar[Mapping[str, Any]] = {"from_zero": None}

    def store_initial_values(self, group: dict[str, Any]) -> None:
        """Decide once whether s starts at zero, because a schedule of the prior does not change s₀."""
        # Steps other than the natural one start with running means, which have no bias.
        if group["posterior"].get("from_zero") is None:
            group["posterior"]["from_zero"] = self.steps[
                group["posterior"]["step_rule"]
            ].is_published and _starts_at_zero(group)

    def update_arguments(self, group: dict[str, Any], step: int, precision: Tensor | None = None) -> dict[str, Any]:
        """Add the bias correction of s."""
        covered = updates_covered(step, self.num_updates + 1, group["posterior"]["curvature_interval"])
        return {
            **super().update_arguments(group, step, precision),
            "from_zero": group["posterior"]["from_zero"],
            "total_weight": 1 - group["posterior"]["betas"][1] ** covered,
        }


def _starts_at_zero(group: dict[str, Any]) -> bool:
    if group["posterior"]["init_precision"] is None:
        return False
    return initial_curvature(group["posterior"]["init_precision"], **effective(group).start_arguments) == 0
