"""Train LeNet-5 on digits, and fine-tune it with the trainer as a user would."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.finetune.data import Images
from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes.zoo import BayesClassifier, create_model

Weights = dict[str, Tensor]


def pretrain(images: Images, seed: int, epochs: int) -> Weights:
    """Train on digits with Adam, and return the weights."""
    seed_everything(seed, verbose=False)
    task = _task(None)
    _fit(task, images, batch_size=64, epochs=epochs)
    return task.model.state_dict()


def finetune(weights: Weights, images: Images, seed: int, epochs: int, callback: Callback | None) -> BayesClassifier:
    """Adapt pretrained weights to new classes, with a new head and Adam's default learning rate."""
    seed_everything(seed, verbose=False)
    task = _task(weights)
    _fit(task, images, batch_size=32, epochs=epochs, callback=callback)
    return task.eval()


def _task(weights: Weights | None) -> BayesClassifier:
    replaces = weights is not None
    model = create_model("lenet5", 10, in_channels=1, pretrained=weights, replace_head=replaces, image_size=28)
    return BayesClassifier(model, num_classes=10, optimizer=lambda parameters: Adam(parameters, lr=1e-3))


def _fit(task: BayesClassifier, images: Images, batch_size: int, epochs: int, callback: Callback | None = None) -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(*images), batch_size=batch_size, shuffle=True)
    with quiet():
        quiet_trainer([callback], epochs).fit(task, loader)
