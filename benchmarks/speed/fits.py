"""The fits: networks, callbacks, and the time of the updates of one fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import IVONCallback, NoisyKFACCallback, VOGNCallback
from lightning_bayes.zoo import LeNet5, ResNet18

WARM_UP: Final = 10  # updates; the first ten measure the curvature, later one in ten does
CLOCKS: Final = {"cpu": time.process_time, "wall": time.perf_counter}


class Network(NamedTuple):
    """A network, and the number of timed updates of a fit, a multiple of ten."""

    title: str
    build: Callable[[], nn.Module]
    updates: int


NETWORKS: Final = {
    "lenet5": Network("LeNet-5", partial(LeNet5, num_classes=10, in_channels=3, image_size=32), 100),
    "resnet18": Network("ResNet-18", partial(ResNet18, num_classes=10), 10),
}
BASELINE: Final = "Adam"
METHODS: Final[dict[str, Callable[[], Callback | None]]] = {
    BASELINE: lambda: None,
    "VOGN": VOGNCallback,
    "VOGN, T = 1": partial(VOGNCallback, curvature_interval=1),
    "IVON": IVONCallback,
    "Noisy K-FAC": NoisyKFACCallback,
}


class Classifier(LightningModule):
    """A user's module: cross-entropy and Adam."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy."""
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam with a small learning rate, because the labels are random."""
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Stopwatch(Callback):
    """Reads the clock before the first batch after the warm-up and after the last batch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.start, self.end = clock, 0.0, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start after the warm-up."""
        if batch_idx == WARM_UP:
            self.start = self.clock()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.end = self.clock()


def seconds_per_update(method: str, network: Network, batch: int, clock: str) -> float:
    """Fit a network on random images; returns the mean seconds of the updates after the warm-up."""
    torch.manual_seed(0)
    count = batch * (WARM_UP + network.updates)
    images = TensorDataset(torch.randn(count, 3, 32, 32), torch.randint(10, (count,)))
    stopwatch = Stopwatch(CLOCKS[clock])
    with quiet():
        trainer = quiet_trainer([stopwatch, METHODS[method]()], epochs=1)
        trainer.fit(Classifier(network.build()), DataLoader(images, batch_size=batch))
    return (stopwatch.end - stopwatch.start) / network.updates
