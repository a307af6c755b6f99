"""Normalisation layers by name, for the models that take ``norm=...``.

BatchNorm (Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167) mixes the examples of a batch, so that per-example
gradients are taken at the batch's statistics. GroupNorm (Wu & He 2018, https://arxiv.org/abs/1803.08494) and filter
response normalisation (Singh & Krishnan 2020, https://arxiv.org/abs/1911.09737) treat every example alone.
"""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError

NormName: TypeAlias = Literal["none", "batch", "group", "filter_response"]

_GROUPS: Final = 32  # as Wu & He; fewer where the channels do not divide by it, or would stand alone


def make_norm(name: NormName, channels: int) -> nn.Module:
    """The normalisation layer called `name`.

    Args:
        name: ``"none"``, ``"batch"``, ``"group"`` (at most 32 groups, of two channels or more) or ``"filter_response"``.
        channels: Channels C of the images ``[batch, C, height, width]`` that it normalises.

    Returns:
        The layer; an identity for ``"none"``.

    Raises:
        HyperparameterError: If the name is unknown.

    Example:
        >>> make_norm("group", 32).num_groups
        16
    """
    if name not in get_args(NormName):
        raise HyperparameterError(f"norm={name!r} is unknown; use one of {', '.join(get_args(NormName))}.")
    if name == "batch":
        return nn.BatchNorm2d(channels)
    if name == "group":
        return nn.GroupNorm(math.gcd(_GROUPS, channels, max(1, channels // 2)), channels)
    return FilterResponseNorm(channels) if name == "filter_response" else nn.Identity()


@final
class FilterResponseNorm(nn.Module):
    """y = γ x / √(ν² + ε) + β with ν² the mean of x² over the pixels of one channel of one example.

    The models put a ReLU behind it instead of the paper's learned threshold max(y, τ).

    Args:
        channels: Channels C.
        epsilon: ε, fixed.
    """

    def __init__(self, channels: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(channels))  # γ
        self.bias = nn.Parameter(torch.zeros(channels))  # β

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images.

        Args:
            images: ``[batch, C, height, width]``.

        Returns:
            Same shape.
        """
        mean_square = images.square().mean((2, 3), keepdim=True)  # ν²
        normalised = images * torch.rsqrt(mean_square + self.epsilon)
        return normalised * self.weight[:, None, None] + self.bias[:, None, None]
