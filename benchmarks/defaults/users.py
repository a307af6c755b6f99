"""A user's module, which knows of no posterior, and its fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.quiet import quiet, quiet_trainer


class UserModule(LightningModule):
    """A network, its loss and optimizer, and what is done to training inputs."""

    def __init__(
        self,
        net: nn.Module,
        configure: Callable[[nn.Module], Any],
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
        augment: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        super().__init__()
        self.net, self.configure, self.loss, self.augment = net, configure, loss, augment

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs."""
        outputs: Tensor = self.net(x)
        return outputs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss."""
        x, y = batch
        return self.loss(self(self.augment(x)), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Call the network."""
        self(batch[0])

    def configure_optimizers(self) -> Any:
        """The user's optimizer and schedule."""
        return self.configure(self)


def fit(
    module: UserModule,
    train_set: Dataset[Any],
    batch: int,
    epochs: int,
    callbacks: Iterable[Callback | None] = (),
    validation: Dataset[Any] | None = None,
    drop_last: bool = False,
    **options: Any,
) -> Trainer:
    """Train a module, and put it into evaluation mode."""
    loader = DataLoader(train_set, batch, shuffle=True, drop_last=drop_last)
    with quiet():
        trainer = quiet_trainer(callbacks, epochs, **options)
        trainer.fit(module, loader, None if validation is None else DataLoader(validation, 500))
    module.eval()
    return trainer


@torch.no_grad()
def outputs_of(module: nn.Module, x: Tensor, rows: int = 1000) -> Tensor:
    """The outputs of many inputs, so many at a time."""
    return torch.cat([module(part) for part in x.split(rows)])  # type: ignore[no-untyped-call]
