"""A ten-line module around an unmodified torchvision network trains with just `VOGNCallback()`."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from tiny_training import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import alexnet, resnet18

from lightning_bayes import VOGNCallback

BATCH = 8


class TorchvisionClassifier(LightningModule):
    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def images(side: int) -> TensorDataset:
    """Two of the ten classes, told apart by brightness."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(2 * BATCH) % 2
    return TensorDataset(torch.randn(len(y), 3, side, side, generator=generator) + (2.0 * y - 1).view(-1, 1, 1, 1), y)


def attributes(module: nn.Module) -> dict[str, tuple]:
    """Names of the attributes, hooks included, and the class of every submodule."""
    lightnings_own = {"_hparams"}  # every fit sets it
    return {
        name: (
            type(sub),
            set(vars(sub)) - lightnings_own,
            [len(v) for k, v in vars(sub).items() if k.endswith("_hooks")],
        )
        for name, sub in module.named_modules()
    }


def loss_at_the_mean(module: TorchvisionClassifier, data: TensorDataset) -> float:
    """In train mode without dropout, because running statistics need more than a few steps."""
    module.train()
    for sub in module.modules():
        if isinstance(sub, nn.Dropout):
            sub.eval()
    with torch.no_grad():
        return float(F.cross_entropy(module.net(data.tensors[0]), data.tensors[1]))


@pytest.mark.parametrize(
    ("build", "side", "lr", "steps"),
    [(resnet18, 32, 1e-3, 6), (alexnet, 64, 1e-4, 3)],  # alexnet's 57 million weights take seconds per step
    ids=["resnet18", "alexnet"],
)
def test_torchvision_network_trains_and_is_returned_as_it_was(build, side, lr, steps):
    module, data = TorchvisionClassifier(build(num_classes=10), lr), images(side)
    before, loss_before = attributes(module), loss_at_the_mean(copy.deepcopy(module), data)
    statistics = {name: buffer.clone() for name, buffer in module.named_buffers()}
    trainer = quiet_trainer(VOGNCallback(), max_epochs=None, max_steps=steps)
    trainer.fit(module, DataLoader(data, batch_size=BATCH, shuffle=True))

    assert trainer.global_step == steps
    assert all(param.isfinite().all() for param in module.parameters())
    assert all(not torch.equal(buffer, statistics[name]) for name, buffer in module.named_buffers())
    assert attributes(module) == before
    assert loss_before > 0.8 * math.log(10)
    assert loss_at_the_mean(module, data) < 0.95 * loss_before


def test_module_can_be_copied_and_pickled_after_fit():
    module, data = TorchvisionClassifier(resnet18(num_classes=10), 1e-3), images(32)
    trainer = quiet_trainer(VOGNCallback(), max_epochs=None, max_steps=2)
    trainer.fit(module, DataLoader(data, batch_size=BATCH))
    module.eval()
    with torch.no_grad():
        expected = module.net(data.tensors[0])
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(twin.net(data.tensors[0]), expected)
