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
    """One network and its published setting.

    Attributes:
        name: Name for `create_model`.
        arguments: Arguments of `create_model`.
        batch: Examples per batch, over all processes of the paper.
        augment: Whether the paper's main row augments with crops and mirroring.
        decays: Whether the learning rate falls to a tenth after half and after three quarters of the epochs, as at epochs
            80 and 120 of 161.
        adam_decay: L2 weight decay of the published Adam, at the learning rate 1e-3.
        sgd: Arguments of the published SGD.
        dropout: Probability of the published Monte-Carlo dropout; without a published one, that of the other networks.
        drops: Types of layers that dropout follows.
        presets: Presets of the callbacks, by method; the preset of VOGN for VGG16 was published for VGG-19.
    """

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
    """A regular expression that matches the names of all layers of the given types.

    Args:
        module: The whole module.
        kinds: Types of layers.

    Returns:
        The expression.

    Example:
        >>> dropout_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), (nn.Linear,))
        '0|2'
    """
    return "|".join(re.escape(name) for name, layer in module.named_modules() if isinstance(layer, kinds))
