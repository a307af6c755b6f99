"""Normalisation layers by name, for models with an argument ``norm``.

BatchNorm (Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167) mixes the examples of a batch, so per-example gradients
are conditional on the batch statistics. GroupNorm (Wu & He 2018, https://arxiv.org/abs/1803.08494) and filter response
normalisation (Singh & Krishnan 2020, https://arxiv.org/abs/1911.09737) treat each example independently.
"""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError

NormName: TypeAlias = Literal["none", "batch", "group", "filter_response"]

_MAX_GROUPS: Final = 32  # as in Wu & He


def make_norm(name: NormName, channels: int) -> nn.Module:
    """Build a normalisation layer by name."""
    if name not in get_args(NormName):
        raise HyperparameterError(f"norm={name!r} is unknown; use one of {', '.join(get_args(NormName))}.")
    if name == "batch":
        return nn.BatchNorm2d(channels)
    if name == "group":
        return nn.GroupNorm(math.gcd(_MAX_GROUPS, channels, max(1, channels // 2)), channels)
    return FilterResponseNorm(channels) if name == "filter_response" else nn.Identity()


@final
class FilterResponseNorm(nn.Module):
    """y = γ x / √(ν² + ε) + β, where ν² is the mean of x² over the pixels of one channel of one example."""

    def __init__(self, channels: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(channels))  # γ
        self.bias = nn.Parameter(torch.zeros(channels))  # β

    def forward(self, images: Tensor) -> Tensor:
        """Normalise images ``[batch, C, height, width]``."""
        mean_square = images.square().mean((2, 3), keepdim=True)  # ν²
        normalised = images * torch.rsqrt(mean_square + self.epsilon)
        return normalised * self.weight[:, None, None] + self.bias[:, None, None]
