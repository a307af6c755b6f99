"""Shaped noise: in each tensor, the curvature determines the shape of the noise and κ its energy.

For each tensor t with curvatures s_i, size r_t and p = δ̃ + γ, without δ̃ if there is no explicit prior (r_t is the larger of
its root mean squares now and at the start of training):

    γ_t = p + ε mean_j max(s_j, 0)
    1/τ_t = 1/τ + mean_j [1 / (s_j + γ_t)] / (Ñ κ² r_t²)
    1/Σ_i = (Ñ/τ_t) (s_i + γ_t)                                             negative s_i count as 0

The mean variance is κ² r_t² until the data require less noise. As Ñ grows, τ_t tends to τ and the precision to
(Ñ/τ)(s + γ_t): the data determine the precision, without a switch. No variance exceeds (1+ε)/ε times the mean of its
tensor, because s + γ_t ≥ ε mean s. With ε = 0.03 the curvature determines the shape, ε = 1 halves the variance at average
curvature, and a large ε makes the noise flat.

This covariance minimises the tempered bound

    E_q[f̄(θ)] + Σ_t (τ_t/Ñ) KL( N(μ_t, Σ_t) ‖ N(c_t, δ_t⁻¹ I) )             δ_t = Ñ γ_t / τ_t

with these temperatures and priors. Without an explicit prior, c_t = μ_t. This is an empirical-Bayes choice: the prior's
centre is optimised too, so the mean minimises E_q[f̄] alone. With an explicit prior N(μ₀, 1/δ),
c_t = μ_t - √(δ̃/γ_t) (μ_t - μ₀), so the tempered KL contributes ½ δ̃ (μ - μ₀)² and its gradient δ̃ (μ - μ₀) for every τ_t.
κ, ε and setting τ_t by energy are **heuristics**: the bound does not imply them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLATNESS = 0.03  # ε
_MIN_DAMPING = 1e-20  # for tensors without curvature, whose noise is flat


class NoiseShape(NamedTuple):
    """The map from curvature to precision in each of several tensors: 1/Σ = scale · (max(s, 0) + damping)."""

    scale: Tensor  # Ñ/τ_t, [tensors]
    damping: Tensor  # γ_t, [tensors]

    @property
    def prior_precision(self) -> Tensor:
        """δ_t of the prior in the tempered bound, ``[tensors]``."""
        return self.scale * self.damping


def noise_shapes(
    curvatures: Sequence[Tensor],
    means: Sequence[Tensor],
    initial_rms: Sequence[Tensor],
    relative_noise: float,
    scale: float,
    stated: Sequence[float],
    flatness: float = FLATNESS,
) -> NoiseShape:
    """The shape of the noise of several tensors.

    Args:
        curvatures: The s of each tensor.
        means: The μ of each tensor, in its shape.
        initial_rms: The root mean square of each tensor at the start of training, below which r_t does not fall.
        relative_noise: κ.
        scale: Ñ/τ.
        stated: The p of each tensor.
        flatness: ε.

    Returns:
        Ñ/τ_t and γ_t.
    """
    device = means[0].device
    positive = torch._foreach_clamp_min(list(curvatures), 0)
    average = torch.stack([s.mean().to(device) for s in positive])
    dampings = noise_damping(average, torch.tensor(stated, dtype=average.dtype, device=device), flatness)
    torch._foreach_add_(positive, [damping.to(s.device) for s, damping in zip(positive, dampings, strict=True)])
    torch._foreach_reciprocal_(positive)
    inverse_means = torch.stack([inverse.mean().to(device) for inverse in positive])
    sizes = tensor_sizes(means, initial_rms)
    return NoiseShape(noise_scale(inverse_means, sizes, relative_noise, scale), dampings)


def noise_damping(curvature_means: Tensor, stated: float | Tensor, flatness: float) -> Tensor:
    """γ_t = p + ε mean_j max(s_j, 0), kept above 0; `curvature_means` are mean_j max(s_j, 0), `stated` is p."""
    return (curvature_means * flatness + stated).clamp_min(_MIN_DAMPING)


def noise_scale(inverse_means: Tensor, sizes: Tensor, relative_noise: float, scale: float) -> Tensor:
    """Ñ/τ_t = Ñ/τ + mean_j [1 / (s_j + γ_t)] / (κ r_t)², ``[tensors]``; κ is `relative_noise`, Ñ/τ is `scale`."""
    return inverse_means * (float(relative_noise) * sizes).pow(-2) + scale


def prior_centre(mean: Tensor, centre: Tensor | float, stated: float | Tensor, damping: float | Tensor) -> Tensor:
    """c_t = μ - √(δ̃/γ_t) (μ - μ₀), the prior's centre; `stated` is δ̃, or 0 without an explicit prior."""
    return mean - (stated / damping) ** 0.5 * (mean - centre)


def tensor_size(mean: Tensor, initial_rms: Tensor) -> Tensor:
    """The size r of one tensor, a scalar; see `tensor_sizes`."""
    return torch.maximum(torch.linalg.vector_norm(mean) / mean.numel() ** 0.5, initial_rms)


def tensor_sizes(means: Sequence[Tensor], sizes_at_start: Sequence[Tensor]) -> Tensor:
    """r, ``[tensors]``: the larger of each tensor's current root mean square and the one at the start of training."""
    now = root_mean_squares(means)
    return torch.maximum(now, torch.stack([size.to(now.device) for size in sizes_at_start]))


def root_mean_squares(tensors: Sequence[Tensor]) -> Tensor:
    """√(mean of squares) of each tensor, ``[tensors]``."""
    norms = torch.stack([norm.to(tensors[0].device) for norm in torch._foreach_norm(list(tensors))])
    return norms / torch.tensor([t.numel() ** 0.5 for t in tensors], dtype=norms.dtype, device=norms.device)
