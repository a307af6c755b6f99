"""The step length of Zhang et al. 2018, eqs. 25-26 (https://arxiv.org/abs/1712.02390), after Ba et al. 2016.

A step α v changes the predictive distribution by KL ≈ ½ α² vᵀ F v. The learning rate is reduced so that the squared Fisher
norm stays below a bound that decays with the epochs:

    α = min(α_max, √(c_k / vᵀ F v))        c_k = c₀ ζᵏ

F is the damped approximation of the step, v = F⁻¹ g, so vᵀ F v = vᵀ g, summed over all layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

PUBLISHED_DECAY = 0.95  # ζ, each epoch


def clip_bound(initial: float, epoch: int, decay: float = PUBLISHED_DECAY) -> float:
    """The bound c_k.

    Args:
        initial: c₀; 1e-3 in the paper, 1e-2 with BatchNorm.
        epoch: k, from 0.
        decay: ζ.

    Returns:
        c₀ ζᵏ.
    """
    return initial * decay**epoch


def fisher_norm(directions: Iterable[Tensor], gradients: Iterable[Tensor], dims: int = 2) -> Tensor:
    """vᵀ F v of the steps v = F⁻¹ g of all layers.

    Args:
        directions: v of each layer.
        gradients: g of each layer.
        dims: Trailing dimensions that belong to the layer; 2 for matrices.

    Returns:
        Σ vᵀ g, one value for each leading dimension that all layers share.
    """
    trailing = tuple(range(-dims, 0))
    return torch.stack([(v * g).sum(trailing) for v, g in zip(directions, gradients, strict=True)]).sum(0)


def clipped_lr(lr: float | Tensor, norm: Tensor, bound: float) -> Tensor:
    """The learning rate that keeps α² vᵀ F v below the bound.

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
