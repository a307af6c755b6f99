"""Shaped noise: in each tensor, the curvature determines the shape of the noise and κ its energy.

For each tensor t with curvatures s_i, size r_t and p = δ̃ + γ, without δ̃ if there is no explicit prior:

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


def noise_shape(statistics: Tensor, relative_noise: float, scale: float) -> NoiseShape:
    """Ñ/τ_t and γ_t of each tensor, from the `noise_statistics` of each, ``[tensors, 3]``, κ and Ñ/τ."""
    sizes, inverse_means, dampings = statistics.unbind(-1)
    return NoiseShape(noise_scale(inverse_means, sizes, relative_noise, scale), dampings)


def noise_statistics(
    curvature: Tensor, mean: Tensor, initial_rms: Tensor, stated: float = 0.0, flatness: float = FLATNESS
) -> Tensor:
    """r_t, mean_j [1 / (s_j + γ_t)] and γ_t of one tensor, ``[3]``; `stated` is p, and `flatness` ε."""
    positive = curvature.clamp_min(0)
    damping = noise_damping(positive.mean(), stated, flatness)
    return torch.stack([tensor_size(mean, initial_rms), positive.add_(damping).reciprocal_().mean(), damping])


def noise_damping(curvature_means: Tensor, stated: float, flatness: float) -> Tensor:
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
    return torch.maximum(root_mean_squares(means), torch.stack(list(sizes_at_start)))


def root_mean_squares(tensors: Sequence[Tensor]) -> Tensor:
    """√(mean of squares) of each tensor, ``[tensors]``."""
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    return norms / torch.tensor([t.numel() ** 0.5 for t in tensors], dtype=norms.dtype, device=norms.device)
