"""The step length of Zhang et al. 2018, eqs. 25-26 (https://arxiv.org/abs/1712.02390), after Ba et al. 2016.

A step α v changes the predictive distribution by KL ≈ ½ α² vᵀ F v. The learning rate is reduced to keep the squared Fisher
norm α² vᵀ F v at or below a bound that decays over the epochs k:

    α = min(α_max, √(c_k / vᵀ F v))        c_k = c₀ ζᵏ, ζ = 0.95, c₀ = 1e-3 (1e-2 with BatchNorm)

F is the damped curvature of the step v = F⁻¹ g, so vᵀ F v = vᵀ g, summed over all layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def fisher_norm(directions: Iterable[Tensor], gradients: Iterable[Tensor]) -> Tensor:
    """Squared Fisher norm vᵀ F v of the steps v = F⁻¹ g, summed over layers."""
    return torch.stack([(v * g).sum((-2, -1)) for v, g in zip(directions, gradients, strict=True)]).sum(0)


def clipped_lr(lr: float | Tensor, norm: Tensor, bound: float) -> Tensor:
    """Learning rate that keeps α² vᵀ F v at or below the bound.

    Args:
        lr: α_max.
        norm: vᵀ F v, at least 0.
        bound: c_k.

    Returns:
        α, at most `lr`, shaped like `norm`.

    Example:
        >>> clipped_lr(0.1, torch.tensor([4.0, 0.0]), bound=0.01)
        tensor([0.0500, 0.1000])
    """
    return torch.minimum((bound / norm).sqrt(), torch.as_tensor(lr, dtype=norm.dtype, device=norm.device))
