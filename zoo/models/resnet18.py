"""ResNet-18 (He et al. 2016, https://arxiv.org/abs/1512.03385), post-activation basic blocks.

    stem "imagenet":  conv(·, 64, 7, stride 2) → norm → ReLU → max-pool 3, stride 2
    stem "cifar":     conv(·, 64, 3) → norm → ReLU
    then two basic blocks each with 64, 128, 256 and 512 filters, global average pooling, 512 → classes

Osawa et al. 2019 (https://arxiv.org/abs/1906.02506) used the ImageNet stem on 32 × 32 images for CIFAR-10. Parameter names
and initialisation follow torchvision, so the ImageNet stem with BatchNorm can load torchvision's published weights.
"""

from __future__ import annotations

from typing import Literal, final

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.zoo.models.images import require_counts, require_images
from lightning_bayes.zoo.models.norms import NormName, make_norm
from lightning_bayes.zoo.registry import register_model


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int, norm: NormName) -> nn.Conv2d:
    bias = norm == "none"  # normalisation layers have their own shift
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=bias)


class _BasicBlock(nn.Module):
    """relu(x' + norm(conv(relu(norm(conv(x)))))), where x' is x or, if the shape changes, norm(conv 1 × 1 (x))."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: NormName) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, out_channels, 3, stride, norm)
        self.bn1 = make_norm(norm, out_channels)
        self.conv2 = _convolution(out_channels, out_channels, 3, 1, norm)
        self.bn2 = make_norm(norm, out_channels)
        self.downsample = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            shortcut = _convolution(in_channels, out_channels, 1, stride, norm)
            self.downsample = nn.Sequential(shortcut, make_norm(norm, out_channels))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.downsample(x) + self.bn2(self.conv2(hidden)))


@register_model("resnet18")
@register_model("resnet18_imagenet", torchvision="resnet18", stem="imagenet")
@final
class ResNet18(nn.Module):
    """ResNet-18: images ``[batch, in_channels, height, width]`` of any size to logits.

    Args:
        num_classes: Number of classes C; the output is ``[batch, C]``.
        in_channels: Number of image channels.
        stem: ``"cifar"`` keeps the image size, ``"imagenet"`` divides it by four.
        norm: Normalisation after each convolution, see `lightning_bayes.zoo.models.norms`.

    Raises:
        HyperparameterError: If the stem is unknown.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        stem: Literal["cifar", "imagenet"] = "cifar",
        norm: NormName = "batch",
    ) -> None:
        if stem not in {"cifar", "imagenet"}:
            raise HyperparameterError(f"ResNet18 got stem={stem!r}; use 'cifar' or 'imagenet'.")
        require_counts("ResNet18", num_classes, in_channels)
        super().__init__()
        self.in_channels = in_channels
        kernel, stride = (3, 1) if stem == "cifar" else (7, 2)
        self.conv1 = _convolution(in_channels, 64, kernel, stride, norm)
        self.bn1 = make_norm(norm, 64)
        self.maxpool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, 1, norm)
        self.layer2 = _stage(64, 128, 2, norm)
        self.layer3 = _stage(128, 256, 2, norm)
        self.layer4 = _stage(256, 512, 2, norm)
        self.fc = nn.Linear(512, num_classes)
        self.apply(_initialise_)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` of images ``[batch, in_channels, height, width]``."""
        require_images(images, "ResNet18", self.in_channels)
        hidden = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        logits: Tensor = self.fc(hidden.mean((2, 3)))
        return logits


def _stage(in_channels: int, out_channels: int, stride: int, norm: NormName) -> nn.Sequential:
    first = _BasicBlock(in_channels, out_channels, stride, norm)
    return nn.Sequential(first, _BasicBlock(out_channels, out_channels, 1, norm))


def _initialise_(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
