"""Shaped noise: the curvature places the noise, and κ sets its energy, tensor by tensor.

For each tensor t, with its curvatures s_i, its size r_t and the prior strength p = δ̃ + γ (0 where no prior is stated):

    γ_t = p + ε mean_j max(s_j, 0)
    1/τ_t = 1/τ + mean_j [1 / (s_j + γ_t)] / (Ñ κ² r_t²)
    1/Σ_i = (Ñ/τ_t) (s_i + γ_t)                                             negative s_i count as 0

So the mean variance is κ² r_t² while the data allow more, and the noise has the shape that the curvature gives it. As Ñ
grows, τ_t tends to τ and the precision to (Ñ/τ)(s + γ_t): the data's own precision takes over without a switch. No
variance exceeds (1+ε)/ε times the tensor's mean, because s + γ_t ≥ ε mean s: ε = 0.03 lets the curvature decide, ε = 1
halves the variance where the curvature is average, and a large ε makes the noise flat.

This is the covariance that minimises the tempered bound

    E_q[f̄(θ)] + Σ_t (τ_t/Ñ) KL( N(μ_t, Σ_t) ‖ N(c_t, δ_t⁻¹ I) )             δ_t = Ñ γ_t / τ_t

with these temperatures and priors. Without a stated prior c_t = μ_t, an empirical-Bayes choice: the prior's centre is
optimised too, so the mean minimises E_q[f̄] alone. With a stated prior N(μ₀, 1/δ) it is c_t = μ_t - √(δ̃/γ_t) (μ_t - μ₀),
so that the KL's gradient at the mean is δ̃ (μ - μ₀), whatever τ_t. **Heuristics** are κ, ε, and the choice of τ_t by
energy: none of them is the result of the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLATNESS = 0.03  # ε
_LEAST_DAMPING = 1e-20  # of tensors without any curvature, whose noise is flat


class Shape(NamedTuple):
    """How curvature becomes precision in each of a few tensors: 1/Σ = scale · (max(s, 0) + damping)."""

    scale: Tensor  # Ñ/τ_t, [tensors]
    damping: Tensor  # γ_t, [tensors]

    @property
    def prior_precision(self) -> Tensor:
        """δ_t of the prior that belongs to the noise, ``[tensors]``."""
        return self.scale * self.damping


def noise_shape(
    curvatures: Sequence[Tensor],
    sizes: Tensor,
    relative_noise: float,
    scale: float,
    stated: float = 0.0,
    flatness: float = FLATNESS,
) -> Shape:
    """The shape of the noise in tensors of one device and dtype.

    Args:
        curvatures: s of each tensor.
        sizes: r of each tensor, see `tensor_sizes`, ``[tensors]``.
        relative_noise: κ.
        scale: Ñ/τ.
        stated: p, of a stated prior and of damping in the noise; 0 for none.
        flatness: ε.

    Returns:
        Ñ/τ_t and γ_t of each tensor.

    Example:
        >>> import torch
        >>> s = torch.tensor([0.0, 1.0])
        >>> shape = noise_shape([s], torch.ones(1), relative_noise=0.3, scale=1)
        >>> 1 / shaped_precision(s, *shape)  # their mean is nearly 0.3² = 0.09
        tensor([0.1769, 0.0026])
    """
    inverse_means, strengths = noise_moments(curvatures, stated, flatness)
    return Shape(noise_scale(inverse_means, sizes, relative_noise, scale), strengths)


def noise_moments(curvatures: Sequence[Tensor], stated: float, flatness: float) -> tuple[Tensor, Tensor]:
    """The moments of the curvature that the shape needs.

    Args:
        curvatures: s of each tensor.
        stated: p, of a stated prior and of damping in the noise.
        flatness: ε.

    Returns:
        mean_j [1 / (s_j + γ_t)] and γ_t, ``[tensors]`` each.
    """
    positive = [curvature.clamp_min(0) for curvature in curvatures]
    strengths = noise_damping(_means(positive), stated, flatness)
    for curvature, strength in zip(positive, strengths.unbind(), strict=True):
        curvature.add_(strength)
    torch._foreach_reciprocal_(positive)
    return _means(positive), strengths


def noise_damping(curvature_means: Tensor, stated: float, flatness: float) -> Tensor:
    """γ_t = p + ε mean_j s_j.

    Args:
        curvature_means: Mean of the positive part of each tensor's curvature.
        stated: p, of a stated prior and of damping in the noise.
        flatness: ε.

    Returns:
        γ_t, above 0, shaped like `curvature_means`.
    """
    return (curvature_means * flatness + stated).clamp_min(_LEAST_DAMPING)


def noise_scale(inverse_means: Tensor, sizes: Tensor, relative_noise: float, scale: float) -> Tensor:
    """Ñ/τ_t = Ñ/τ + mean_j [1 / (s_j + γ_t)] / (κ r_t)².

    Args:
        inverse_means: The mean of each tensor.
        sizes: r_t.
        relative_noise: κ.
        scale: Ñ/τ.

    Returns:
        Ñ/τ_t, shaped like `sizes`.
    """
    return inverse_means * (float(relative_noise) * sizes).pow(-2) + scale


def shaped_precision(curvature: Tensor, scale: Tensor, damping: Tensor) -> Tensor:
    """1/Σ = (Ñ/τ_t)(max(s, 0) + γ_t); arguments as in `Shape`, each broadcast to `curvature`."""
    return curvature.clamp_min(0).add_(damping).mul_(scale)


def prior_centre(mean: Tensor, centre: Tensor | float, stated: float | Tensor, damping: Tensor) -> Tensor:
    """c_t = μ - √(δ̃/γ_t) (μ - μ₀), the centre of the prior that belongs to the noise.

    Args:
        mean: μ.
        centre: μ₀ of a stated prior.
        stated: δ̃ of it; 0 for none, so that the centre is the mean.
        damping: γ_t.

    Returns:
        c_t, shaped like the mean.
    """
    return mean - (stated / damping).sqrt().to(mean) * (mean - centre)


def _means(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of each tensor of numbers that are not negative, ``[tensors]``."""
    sums = torch.stack(torch._foreach_norm(list(tensors), 1))
    return sums / torch.tensor([t.numel() for t in tensors], dtype=sums.dtype, device=sums.device)
