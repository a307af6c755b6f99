"""Plain ``nn.Module`` architectures, one per file. Importing this package imports every file, which registers its models."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from lightning_bayes.zoo.models.alexnet import AlexNet
from lightning_bayes.zoo.models.lenet import LeNet5
from lightning_bayes.zoo.models.mlp import MLP
from lightning_bayes.zoo.models.resnet18 import ResNet18
from lightning_bayes.zoo.models.vgg16 import VGG16

__all__ = ["MLP", "VGG16", "AlexNet", "LeNet5", "ResNet18"]

for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)
