"""Networks with BatchNorm that train in minutes on a CPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))


def small_resnet(data: Any) -> nn.Module:
    """ResNet with eight layers: one block each of 16, 32 and 64 filters (He et al. 2016, section 4.2, with n = 1)."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = (_Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2))
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def batch_norm_cnn(data: Any) -> nn.Module:
    """Three convolutions of 16, 32 and 64 filters with BatchNorm, 24 thousand weights."""
    channels = (data.train_x.shape[1], 16, 32, 64)
    stages = [
        layer
        for inputs, outputs in itertools.pairwise(channels)
        for layer in (nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*stages[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))
