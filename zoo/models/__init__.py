"""Plain ``nn.Module`` architectures, one per file."""

from __future__ import annotations

from lightning_bayes.zoo.models.alexnet import AlexNet
from lightning_bayes.zoo.models.lenet import LeNet5
from lightning_bayes.zoo.models.mlp import MLP
from lightning_bayes.zoo.models.resnet18 import ResNet18
from lightning_bayes.zoo.models.vgg16 import VGG16

__all__ = ["MLP", "VGG16", "AlexNet", "LeNet5", "ResNet18"]
