"""Two clusters of points on a curve with a gap between them.

y = sin(4 x) + 0.3 x + ε        ε ~ N(0, 0.1²)        x in [-1, -0.4] and [0.4, 1]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

NOISE_STD = 0.1
GAP = (-0.4, 0.4)
EDGE = 1.0  # data are within ±1
SHOWN = 1.6  # predictions are shown within ±1.6


class Points(NamedTuple):
    """Inputs and targets, ``[N, 1]`` each."""

    inputs: Tensor
    targets: Tensor


class Band(NamedTuple):
    """The prediction of a method at the inputs of the figure.

    Attributes:
        mean: Posterior mean of f.
        std: Posterior standard deviation of f (epistemic), without the noise.
        scale: The scale chosen by `PosteriorScale`; None without it.
    """

    mean: list[float]
    std: list[float]
    scale: float | None = None

    def spread(self, where: Tensor) -> float:
        """The epistemic standard deviation, averaged over the inputs in a mask."""
        return float(torch.tensor(self.std)[where.flatten()].mean())


def curve(inputs: Tensor) -> Tensor:
    """The mean of y."""
    return torch.sin(4 * inputs) + 0.3 * inputs


def draw_points(count: int, seed: int) -> Points:
    """Draw N points, half in each cluster."""
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
    """Mask of the inputs in the clusters."""
    return (inputs.abs() >= GAP[1]) & (inputs.abs() <= EDGE)


def in_gap(inputs: Tensor) -> Tensor:
    """Mask of the inputs in the middle half of the gap."""
    return inputs.abs() <= GAP[1] / 2
