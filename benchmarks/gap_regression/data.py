"""Two clusters of points on a curve, and nothing between them.

y = sin(4 x) + 0.3 x + ε        ε ~ N(0, 0.1²)        x in [-1, -0.4] and [0.4, 1]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

NOISE_STD = 0.1
GAP = (-0.4, 0.4)
EDGE = 1.0  # data lie within ±1
SHOWN = 1.6  # predictions are shown within ±1.6


class Points(NamedTuple):
    """Inputs and targets, ``[N, 1]`` each."""

    inputs: Tensor
    targets: Tensor


class Band(NamedTuple):
    """What a method says at the inputs of the figure.

    Attributes:
        mean: Of f under the posterior.
        std: Of f under the posterior: the epistemic standard deviation, without the noise.
        scale: The width that `PosteriorScale` chose; None without it.
    """

    mean: list[float]
    std: list[float]
    scale: float | None = None

    def spread(self, where: Tensor) -> float:
        """The epistemic standard deviation averaged over some of the inputs."""
        return float(torch.tensor(self.std)[where.flatten()].mean())


def curve(inputs: Tensor) -> Tensor:
    """The mean of y; the same shape."""
    return torch.sin(4 * inputs) + 0.3 * inputs


def draw_points(count: int, seed: int) -> Points:
    """Draw data.

    Args:
        count: N, half in each cluster.
        seed: Of the inputs and of the noise.

    Returns:
        The points.
    """
    generator = Generator().manual_seed(seed)
    width = EDGE - GAP[1]
    left = -EDGE + width * torch.rand(count // 2, 1, generator=generator)
    right = GAP[1] + width * torch.rand(count - count // 2, 1, generator=generator)
    inputs = torch.cat([left, right])
    return Points(inputs, curve(inputs) + NOISE_STD * torch.randn(count, 1, generator=generator))


def grid() -> Tensor:
    """Inputs of the figure, ``[193, 1]``."""
    return torch.linspace(-SHOWN, SHOWN, 193)[:, None]


def on_data(inputs: Tensor) -> Tensor:
    """Which inputs lie in a cluster; the same shape."""
    return (inputs.abs() >= GAP[1]) & (inputs.abs() <= EDGE)


def in_gap(inputs: Tensor) -> Tensor:
    """Which inputs lie in the middle half of the gap; the same shape."""
    return inputs.abs() <= GAP[1] / 2
