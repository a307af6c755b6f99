"""ResNet-20 of He et al. 2015, section 4.2, https://arxiv.org/abs/1512.03385, with filter response normalisation."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.zoo.models.norms import make_norm


@final
class Block(nn.Module):
    """Two convolutions, and a shortcut that is a convolution of one pixel where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = (make_norm("filter_response", outputs) for _ in range(2))
        same = (inputs, stride) == (outputs, 1)
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps."""
        hidden = F.silu(self.first_norm(self.first(x)))
        return F.silu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def resnet20(num_classes: int = 10) -> nn.Sequential:
    """Three stages of three blocks with 16, 32 and 64 channels; logits for images ``[batch, 3, 32, 32]``."""
    sides = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False), make_norm("filter_response", 16), nn.SiLU()
    blocks = [Block(*each) for each in sides]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))
