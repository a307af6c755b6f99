"""LeNet-5, the variant of the VOGN experiments (Osawa et al. 2019, https://arxiv.org/abs/1906.02506).

conv(·, 6, 5) → ReLU → max-pool 2 → conv(6, 16, 5) → ReLU → max-pool 2 → 120 → 84 → classes, with biases in all layers,
after LeCun et al. 1998 (https://doi.org/10.1109/5.726791). Only the padding depends on the image size:

    32 × 32:  no padding               32 → 28 → 14 → 10 → 5    16 · 5 · 5 = 400 features
    28 × 28:  2 on the first (classic) 28 → 28 → 14 → 10 → 5    400 features
     8 × 8:   2 on both                 8 →  8 →  4 →  4 → 2    16 · 2 · 2 = 64 features

An optional normalisation precedes each ReLU. With BatchNorm, this is the network of the paper's single-device experiments.
"""

from __future__ import annotations

from typing import Final, final

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.zoo.models.images import require_counts, require_images, require_size
from lightning_bayes.zoo.models.norms import NormName, make_norm
from lightning_bayes.zoo.registry import register_model

_GEOMETRIES: Final = {8: (2, 2, 64), 28: (2, 0, 400), 32: (0, 0, 400)}  # two paddings, and features after pooling


@register_model("lenet5")
@final
class LeNet5(nn.Module):
    """LeNet-5 with ReLU and max-pooling: images ``[batch, in_channels, image_size, image_size]`` to logits.

    Args:
        num_classes: Number of classes C; the output is ``[batch, C]``.
        in_channels: Number of image channels.
        image_size: Height and width of the images in pixels: 8, 28 or 32.
        norm: Normalisation before each ReLU, see `lightning_bayes.zoo.models.norms`. Filter response normalisation averages
            over pixels, so it follows only the convolutions.
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 1, image_size: int = 28, norm: NormName = "none"
    ) -> None:
        require_size("LeNet5", image_size, _GEOMETRIES)
        require_counts("LeNet5", num_classes, in_channels)
        super().__init__()
        padding1, padding2, features = _GEOMETRIES[image_size]
        self.in_channels, self.image_size = in_channels, image_size
        self.conv1 = nn.Conv2d(in_channels, 6, kernel_size=5, padding=padding1)
        self.bn1 = make_norm(norm, 6)
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5, padding=padding2)
        self.bn2 = make_norm(norm, 16)
        self.fc1 = nn.Linear(features, 120)
        self.bn3 = _norm_of_features(norm, 120)
        self.fc2 = nn.Linear(120, 84)
        self.bn4 = _norm_of_features(norm, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, in_channels, image_size, image_size]``."""
        require_images(images, "LeNet5", self.in_channels, self.image_size)
        hidden = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 2)
        hidden = F.max_pool2d(F.relu(self.bn2(self.conv2(hidden))), 2)
        hidden = F.relu(self.bn3(self.fc1(hidden.flatten(1))))
        hidden = F.relu(self.bn4(self.fc2(hidden)))
        logits: Tensor = self.fc3(hidden)
        return logits


def _norm_of_features(norm: NormName, features: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm1d(features)
    return nn.Identity() if norm == "filter_response" else make_norm(norm, features)
