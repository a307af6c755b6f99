"""Two networks with normalisation layers, and how a user trains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.defaults.mode_problems import cropped_and_flipped
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes.zoo import create_model

DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Weights = dict[str, Tensor]
Labelled = tuple[Tensor, Tensor]  # images and labels


@dataclass(frozen=True)
class Network:
    """An architecture, its last layer, and AdamW's learning rate."""

    build: Callable[..., nn.Module]  # of the number of classes
    head: str
    lr: float

    def create(self, classes: int, weights: Weights | None) -> nn.Module:
        """Random weights, or pretrained ones below a random last layer."""
        return self.build(num_classes=classes, pretrained=weights, replace_head=None if weights is None else True)


_VIT: Final[dict[str, Any]] = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4}
NETWORKS: Final = {
    "resnet18": Network(partial(create_model, "resnet18"), "fc", 1e-3),
    "resnet18_imagenet": Network(partial(create_model, "resnet18_imagenet"), "fc", 1e-3),
    "vit": Network(partial(create_model, "timm/vit_tiny_patch16_224", **_VIT), "head", 5e-4),
}


class Classifier(LightningModule):
    """A user's module: AdamW and half a cosine."""

    def __init__(self, net: nn.Module, lr: float, *, augmented: bool = False) -> None:
        super().__init__()
        self.net, self.lr, self.augmented = net, lr, augmented

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, classes]``."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Labelled, batch_idx: int) -> Tensor:
        """Mean cross-entropy."""
        x, y = batch
        return F.cross_entropy(self(cropped_and_flipped(x) if self.augmented else x), y)

    def validation_step(self, batch: Labelled, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The user's optimizer and schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, weight_decay=0.01)
        updates = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    module: Classifier,
    train: Labelled,
    val: Labelled | None,
    seed: int,
    epochs: int,
    *callbacks: Callback,
    **options: Any,
) -> None:
    """Train a module in batches of 64, and leave it on the device, in evaluation mode."""
    seed_everything(seed, verbose=False)
    loader: DataLoader[Any] = DataLoader(TensorDataset(*train), 64, shuffle=True, drop_last=True)
    validation: DataLoader[Any] | None = None if val is None else DataLoader(TensorDataset(*val), 500)
    with quiet():
        quiet_trainer(callbacks, epochs, accelerator="auto", **options).fit(module, loader, validation)
    module.to(DEVICE).eval()


def pretrain(network: Network, images: Labelled, seed: int, epochs: int) -> Weights:
    """Train all weights on random crops and flips of seven classes."""
    seed_everything(seed, verbose=False)
    module = Classifier(network.create(7, None), network.lr, augmented=True)
    fit(module, images, None, seed, epochs, precision="bf16-mixed" if DEVICE.type == "cuda" else "32-true")
    return {name: value.cpu().clone() for name, value in module.net.state_dict().items()}
