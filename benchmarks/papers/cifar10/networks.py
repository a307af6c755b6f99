"""The networks, and the optimizer and the callback of each method, by default and as published."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from lightning.pytorch import Callback
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from benchmarks.papers.cifar10.resnet20 import resnet20
from lightning_bayes import (
    BBBCallback,
    IVONCallback,
    LaplaceCallback,
    MCDropoutCallback,
    NoisyKFACCallback,
    OGNCallback,
    SWAGCallback,
    VariationalCallback,
    VOGNCallback,
)
from lightning_bayes.zoo import create_model


@dataclass(frozen=True)
class Network:
    """One network and its published setting."""

    name: str
    batch: int
    augment: bool
    schedule: Literal["constant", "steps", "cosine"]
    adam_decay: float
    presets: Mapping[str, str]
    dropout: float = 0.1
    drops: tuple[type[nn.Module], ...] = (nn.Conv2d, nn.Linear)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sgd: tuple[float, float] = (0.1, 1e-4)  # learning rate and weight decay

    def build(self) -> nn.Module:
        """The network with random weights."""
        if self.name == "resnet20":
            return resnet20()
        return create_model(self.name, num_classes=10, in_channels=3, **self.arguments)


_OSAWA = "osawa2019-cifar10"
NETWORKS: Final[dict[str, Network]] = {
    "lenet": Network(
        "lenet5", 128, False, "constant", 0.01, {"vogn": f"{_OSAWA}-lenet"}, arguments={"image_size": 32}, sgd=(1e-3, 0.01)
    ),
    "alexnet": Network(
        "alexnet", 256, True, "steps", 1e-4, dict.fromkeys(("vogn", "noisy_kfac"), f"{_OSAWA}-alexnet"), 0.5, (nn.Conv2d,)
    ),
    "resnet18": Network(
        "resnet18", 256, True, "steps", 5e-4, {"vogn": f"{_OSAWA}-resnet18"}, arguments={"stem": "imagenet"}
    ),
    "vgg16": Network(
        "vgg16_half", 128, True, "steps", 1e-4,
        {"vogn": f"{_OSAWA}-vgg19", "noisy_kfac": "zhang2018-cifar10-vgg16-augmented-batchnorm"},
    ),
    "resnet20": Network("resnet20", 50, True, "cosine", 2e-4, {"ivon": "shen2024-cifar10-resnet20"}),
}  # fmt: skip


def dropout_layers(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str:
    """A regular expression that matches the names of all layers of the given types."""
    return "|".join(re.escape(name) for name, layer in module.named_modules() if isinstance(layer, kinds))


Settings = Literal["default", "l2", "published"]  # l2: the callbacks' defaults on the published Adam
Build = Callable[[Iterable[nn.Parameter]], Optimizer]

VARIATIONAL: Final[dict[str, type[VariationalCallback]]] = {
    "bbb": BBBCallback,
    "ogn": OGNCallback,
    "vogn": VOGNCallback,
    "noisy_kfac": NoisyKFACCallback,
    "ivon": IVONCallback,
}
POSTHOC: Final[dict[str, Callable[..., Callback]]] = {"laplace": LaplaceCallback, "swag": SWAGCallback}
METHODS: Final = {
    "sgd": "SGD",
    "adam": "Adam",
    "mc_dropout": "MC-dropout",
    "bbb": "BBB",
    "ogn": "OGN",
    "vogn": "VOGN",
    "noisy_kfac": "Noisy K-FAC",
    "ivon": "IVON",
    "laplace": "Laplace on Adam",
    "swag": "SWAG on Adam",
    "ensemble": "Ensemble of 5 by Adam",
}
MEMBERS: Final = 5  # size of the ensemble


def why_not(model: str, method: str, settings: Settings) -> str:
    """The reason why a method cannot run with these settings; empty if it can."""
    network = NETWORKS[model]
    supported = {"sgd", "adam", *network.presets, *({"mc_dropout"} if model != "resnet18" else ())}
    return "no published setting" if settings == "published" and method not in supported else ""


def optimizer(network: Network, method: str, settings: Settings) -> Build:
    """The constructor of the module's optimizer under the given settings."""
    published = settings == "l2" or (settings == "published" and method in {"sgd", "adam", "mc_dropout"})
    if method == "sgd":
        lr, decay = network.sgd if published else (0.05, 0.0)
        return lambda parameters: SGD(parameters, lr=lr, momentum=0.9, weight_decay=decay)
    decay = network.adam_decay if published else 0.0
    return lambda parameters: Adam(parameters, lr=1e-3, weight_decay=decay)


def callback(
    network: Network, method: str, settings: Settings, module: nn.Module, augmentation_factor: float, **overrides: Any
) -> Callback | None:
    """Build the callback of a method."""
    if method == "mc_dropout":
        return MCDropoutCallback(p=network.dropout, layers=dropout_layers(module, network.drops), **overrides)
    if method in POSTHOC:
        return POSTHOC[method](**overrides)
    if method not in VARIATIONAL:
        return None
    if settings == "published":
        return VARIATIONAL[method].from_preset(network.presets[method], **overrides)
    return VARIATIONAL[method](data_augmentation_factor=augmentation_factor, **overrides)
