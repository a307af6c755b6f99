"""Networks and batches of the speed benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import convnext_tiny

from benchmarks.speed.setting import Setting
from lightning_bayes.zoo.models import VGG16, AlexNet, LeNet5, ResNet18


class Case(NamedTuple):
    """A network of the benchmark."""

    title: str
    build: Callable[[], nn.Module]
    image_size: int = 32
    num_classes: int = 10
    batches: tuple[int, ...] = (32, 128)


class Rows(nn.Module):
    """A recurrent network that reads an image row by row.

    Args:
        kind: Class of the recurrent layer.
        features: Size of the hidden state.
    """

    def __init__(self, kind: type[nn.RNNBase], features: int = 64) -> None:
        super().__init__()
        layer: Callable[..., nn.RNNBase] = kind
        self.rows, self.head = layer(3 * 32, features, num_layers=2, batch_first=True), nn.Linear(features, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images ``[B, 3, 32, 32]``."""
        outputs, _ = self.rows(images.transpose(1, 2).flatten(2))
        logits: Tensor = self.head(outputs[:, -1])
        return logits


MODELS: dict[str, Case] = {
    "lenet": Case("LeNet-5", lambda: LeNet5(num_classes=10, in_channels=3, image_size=32)),
    "alexnet": Case("AlexNet", lambda: AlexNet(num_classes=10)),
    "vgg16": Case("VGG16", lambda: VGG16(num_classes=10)),
    "vgg16-bn": Case("VGG16-BN", lambda: VGG16(num_classes=10, norm="batch")),
    "resnet18": Case("ResNet-18", lambda: ResNet18(num_classes=10)),
    "lstm": Case("LSTM over rows", lambda: Rows(nn.LSTM), batches=(32,)),
    "convnext": Case("ConvNeXt-T", lambda: convnext_tiny(num_classes=10), image_size=64, batches=(32,)),
    "gru": Case("GRU over rows", lambda: Rows(nn.GRU), batches=(32,)),
    # For stock BackPACK and torch.func, which do not support BatchNorm in training mode.
    "resnet18-eval": Case(
        "ResNet-18, BatchNorm in evaluation mode", lambda: ResNet18(num_classes=10).eval(), batches=(32,)
    ),
    "resnet18-imagenet": Case(
        "ResNet-18, ImageNet size", lambda: ResNet18(num_classes=1000, stem="imagenet"), 224, 1000, (16,)
    ),
}


@dataclass
class Task:
    """A model and the one batch on which it is trained."""

    model: nn.Module
    images: Tensor  # [batch, 3, size, size]
    labels: Tensor  # [batch]
    setting: Setting

    def autocast(self) -> AbstractContextManager[None]:
        """The autocast context for forward and loss."""
        mixed = self.setting.precision == "bf16-mixed"
        return torch.autocast(self.images.device.type, dtype=torch.bfloat16, enabled=mixed)

    def loss(self, model: nn.Module | None = None) -> Tensor:
        """Mean cross-entropy of the batch under `model`, by default the task's model."""
        with self.autocast():
            return F.cross_entropy((model or self.model)(self.images), self.labels)


def make_task(case: Case, batch: int, setting: Setting) -> Task:
    """Build a model and a batch of random images and labels; all methods get the same ones."""
    torch.manual_seed(0)
    images = torch.randn(batch, 3, case.image_size, case.image_size)
    labels = torch.randint(case.num_classes, (batch,))
    return Task(case.build().to(setting.device), images.to(setting.device), labels.to(setting.device), setting)
