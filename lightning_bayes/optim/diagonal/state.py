"""The state of mean-field methods for one parameter, and the operations that all of them share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MeanFieldState(NamedTuple):
    """State of one parameter; all tensors have its shape."""

    mean: Tensor  # μ
    curvature: Tensor  # s, of the mean negative log-likelihood, prior not included
    momentum: Tensor  # m


def average(old: Tensor, new: Tensor, weight_of_old: float) -> Tensor:
    """Return the running average β·old + (1-β)·new."""
    return old.lerp(new, 1 - weight_of_old)


def debiased(momentum: Tensor, beta: float, step: int) -> Tensor:
    """Return m̂ = m / (1-βᵗ), the bias-corrected running average after `step` updates from zero."""
    return momentum / (1 - beta**step)


def with_prior(grad: Tensor, distance: Tensor, prior: float | Tensor) -> Tensor:
    """Return ĝ + δ̃ (μ - μ₀), for a scalar δ̃ or one per weight."""
    if isinstance(prior, Tensor):
        return torch.addcmul(grad, distance, prior)
    return torch.add(grad, distance, alpha=prior)
