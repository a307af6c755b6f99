"""The four networks and their published training settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from lightning_bayes.zoo import create_model


@dataclass(frozen=True)
class Network:
    """One network and its published setting."""

    name: str
    batch: int
    augment: bool
    decays: bool
    adam_decay: float
    presets: Mapping[str, str]
    dropout: float = 0.1
    drops: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Linear)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sgd: Mapping[str, float] = field(default_factory=lambda: {"lr": 0.1, "weight_decay": 1e-4})

    def build(self) -> nn.Module:
        """The network with random weights."""
        return create_model(self.name, num_classes=10, in_channels=3, **self.arguments)


NETWORKS: Final[dict[str, Network]] = {
    "lenet": Network(
        "lenet5",
        batch=128,
        augment=False,
        decays=False,
        adam_decay=0.01,
        presets={"vogn": "osawa2019-cifar10-lenet"},
        arguments={"image_size": 32},
        sgd={"lr": 1e-3, "weight_decay": 0.01},
    ),
    "alexnet": Network(
        "alexnet",
        batch=256,
        augment=True,
        decays=True,
        adam_decay=1e-4,
        presets={"vogn": "osawa2019-cifar10-alexnet", "noisy_kfac": "osawa2019-cifar10-alexnet"},
        dropout=0.5,
        drops=(nn.Conv2d,),
    ),
    "resnet18": Network(
        "resnet18",
        batch=256,
        augment=True,
        decays=True,
        adam_decay=5e-4,
        presets={"vogn": "osawa2019-cifar10-resnet18"},
        arguments={"stem": "imagenet"},
    ),
    "vgg16": Network(
        "vgg16_half",
        batch=128,
        augment=True,
        decays=True,
        adam_decay=1e-4,
        presets={"vogn": "osawa2019-cifar10-vgg19", "noisy_kfac": "zhang2018-cifar10-vgg16-augmented-batchnorm"},
    ),
}


def dropout_layers(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str:
    """A regular expression that matches the names of all layers of the given types."""
    return "|".join(re.escape(name) for name, layer in module.named_modules() if isinstance(layer, kinds))
