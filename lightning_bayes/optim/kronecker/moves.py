"""Steps whose directions are all computed before the first parameter moves, because they share one length.

The step length of Zhang et al. 2018, eqs. 25-26 (https://arxiv.org/abs/1712.02390), after Ba et al. 2016.

A step α v changes the predictive distribution by KL ≈ ½ α² vᵀ F v. The learning rate is reduced to keep the squared Fisher
norm α² vᵀ F v at or below a bound that decays over the epochs k:

    α = min(α_max, √(c_k / vᵀ F v))        c_k = c₀ ζᵏ, ζ = 0.95, c₀ = 1e-3 (1e-2 with BatchNorm)

F is the damped curvature of the step v = F⁻¹ g, so vᵀ F v = vᵀ g, summed over all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.steps import CohortUpdate


@final
@dataclass(eq=False)
class Move(CohortUpdate):
    """Parameters whose state is already updated, with the changes of their means at learning rate 1."""

    params: Sequence[nn.Parameter]
    states: Sequence[dict[str, Any]]
    group: dict[str, Any]
    summed: float
    changes: list[Tensor] = field(default_factory=list)
    norm: Tensor | None = None  # squared Fisher norm of the changes
    clip_factor: float = 1.0

    @override
    def prior_weights(self) -> float:
        return effective(self.group).stated_prior

    @override
    def move_(self) -> None:
        torch._foreach_add_(list[Tensor](self.params), self.propose_(float(self.group["lr"])))

    @override
    def propose_(self, lr: float) -> list[Tensor]:
        torch._foreach_mul_(self.changes, lr * self.clip_factor)
        return self.changes

    @override
    def average_(self) -> None:
        """Do nothing, because the curvature is already updated."""


def fisher_norm(directions: Iterable[Tensor], gradients: Iterable[Tensor]) -> Tensor:
    """Squared Fisher norm vᵀ F v of the steps v = F⁻¹ g, summed over layers."""
    return torch.stack([(v * g).sum((-2, -1)) for v, g in zip(directions, gradients, strict=True)]).sum(0)


def clipped_lr(lr: float | Tensor, norm: Tensor, bound: float) -> Tensor:
    """α at or below α_max = `lr` that keeps α² vᵀ F v = α² `norm` at or below the `bound`; shaped like `norm`."""
    return torch.minimum((bound / norm).sqrt(), torch.as_tensor(lr, dtype=norm.dtype, device=norm.device))
