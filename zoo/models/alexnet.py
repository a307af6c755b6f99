"""AlexNet: the variant of the VOGN experiments on CIFAR-10, and torchvision's variant for ImageNet.

    32 × 32:    conv(·, 64, 11, stride 4, padding 5) → ReLU → max-pool 2 → conv(64, 192, 5) → ReLU → max-pool 2
                → conv(192, 384, 3) → ReLU → conv(384, 256, 3) → ReLU → conv(256, 256, 3) → ReLU → max-pool 2 → classes
    224 × 224:  "One weird trick" (Krizhevsky 2014, https://arxiv.org/abs/1404.5997): the same five convolutions, the first
                with padding 2, max-pool 3 with stride 2, then 9216 → 4096 → 4096 → classes with dropout

The first variant follows Osawa et al. 2019 (https://arxiv.org/abs/1906.02506). All layers have biases and there is no
normalisation. The second variant uses torchvision's parameter names, so it can load torchvision's published weights.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from lightning_bayes.zoo.models.images import require_counts, require_images, require_size
from lightning_bayes.zoo.registry import register_model


@register_model("alexnet")
@register_model("alexnet_imagenet", torchvision="alexnet", image_size=224)
@final
class AlexNet(nn.Module):
    """AlexNet: images ``[batch, in_channels, image_size, image_size]`` to logits.

    Args:
        num_classes: Number of classes C; the output is ``[batch, C]``.
        in_channels: Number of image channels.
        image_size: 32 for the CIFAR variant, 224 for the ImageNet variant.
        dropout: Dropout probability at the inputs of the two hidden linear layers of the ImageNet variant.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32, dropout: float = 0.5) -> None:
        require_size("AlexNet", image_size, (32, 224))
        require_counts("AlexNet", num_classes, in_channels)
        super().__init__()
        self.in_channels, self.image_size = in_channels, image_size
        small = image_size == 32
        pool = 2 if small else 3
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 64, 11, stride=4, padding=5 if small else 2),
            nn.ReLU(),
            nn.MaxPool2d(pool, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(pool, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(pool, stride=2),
        )
        self.classifier = nn.Linear(256, num_classes) if small else _imagenet_classifier(num_classes, dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, in_channels, image_size, image_size]``."""
        require_images(images, "AlexNet", self.in_channels, self.image_size)
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _imagenet_classifier(num_classes: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(dropout),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, num_classes),
    )
