"""The methods: the user's optimizer, and the callback that joins it.

Settings are ``"default"``, the defaults of the callbacks with Adam at the learning rate 1e-3, or ``"published"``, the
released settings of Osawa et al., or of Zhang et al. for Noisy K-FAC on VGG16. No settings were released for BBB, for OGN,
and for dropout in ResNet-18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

from lightning.pytorch import Callback
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from benchmarks.papers.cifar10.networks import NETWORKS, Network, dropout_layers
from lightning_bayes import (
    BBBCallback,
    LaplaceCallback,
    MCDropoutCallback,
    NoisyKFACCallback,
    OGNCallback,
    SWAGCallback,
    VariationalCallback,
    VOGNCallback,
)

Settings = Literal["default", "published"]
Build = Callable[[Iterable[nn.Parameter]], Optimizer]

VARIATIONAL: Final[dict[str, type[VariationalCallback]]] = {
    "bbb": BBBCallback,
    "ogn": OGNCallback,
    "vogn": VOGNCallback,
    "noisy_kfac": NoisyKFACCallback,
}
METHODS: Final = {
    "sgd": "SGD",
    "adam": "Adam",
    "mc_dropout": "MC-dropout",
    "bbb": "BBB",
    "ogn": "OGN",
    "vogn": "VOGN",
    "noisy_kfac": "Noisy K-FAC",
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
    published = settings == "published" and method in {"sgd", "adam", "mc_dropout"}
    if method == "sgd":
        arguments = dict(network.sgd) if published else {"lr": 0.05}
        return lambda parameters: SGD(parameters, momentum=0.9, **arguments)
    decay = network.adam_decay if published else 0.0
    return lambda parameters: Adam(parameters, lr=1e-3, weight_decay=decay)


def callback(
    network: Network, method: str, settings: Settings, module: nn.Module, augmentation_factor: float, **overrides: Any
) -> Callback | None:
    """Build the callback of a method."""
    if method == "mc_dropout":
        layers = dropout_layers(module, network.drops)
        return MCDropoutCallback(p=network.dropout, layers=layers, **overrides)
    if method == "laplace":
        return LaplaceCallback(**overrides)
    if method == "swag":
        return SWAGCallback(**overrides)
    if method not in VARIATIONAL:
        return None
    kind = VARIATIONAL[method]
    if settings == "published":
        return kind.from_preset(network.presets[method], **overrides)
    return kind(data_augmentation_factor=augmentation_factor, **overrides)
