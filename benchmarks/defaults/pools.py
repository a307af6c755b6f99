"""Small classifiers with many held-out examples, and their outputs under samples at any width of the posterior.

Tables of scikit-learn, with a third for training: *wine* and *cancer* (linear), *digits* (MLP). Images, with 2,000 for
training: *fashion* (a convolutional network with BatchNorm) and *cifar* (LeNet-5). The user's optimizer is AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.quiet import quiet, quiet_trainer
from lightning_bayes import IVONCallback, LaplaceCallback, MultiModeCallback, SWAGCallback, VOGNCallback
from lightning_bayes.predictive import PosteriorSamples, Samples
from lightning_bayes.zoo import CIFAR10DataModule, FashionMNISTDataModule, LeNet5

SAMPLES, MEMBERS = 10, 3
POOL = 2300  # held-out images
WIDE = ("vogn", "ivon", "swag", "laplace")  # methods whose posterior has a width
METHODS = (*("user", "ensemble", "modes"), *WIDE)


class Problem(NamedTuple):
    """A data set, its network and the length of its fit."""

    load: Callable[[Path, int], tuple[Tensor, Tensor, int]]  # inputs and labels, the first so many for training
    network: Callable[[int, int], nn.Module]  # of the numbers of inputs and classes
    epochs: int


def _table(read: Any) -> Callable[[Path, int], tuple[Tensor, Tensor, int]]:
    def load(root: Path, seed: int) -> tuple[Tensor, Tensor, int]:
        data = read()
        x = torch.tensor((data.data - data.data.mean(0)) / (data.data.std(0) + 1e-6), dtype=torch.float32)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        return x[order], torch.tensor(data.target)[order], len(x) // 3

    return load


def _images(module_class: Any) -> Callable[[Path, int], tuple[Tensor, Tensor, int]]:
    @cache
    def every(root: Path) -> Any:
        module = module_class(root=str(root), val_size=0, train_size=40_000)
        module.setup("fit")
        return module.train_set

    def load(root: Path, seed: int) -> tuple[Tensor, Tensor, int]:
        rows = torch.randperm(40_000, generator=torch.Generator().manual_seed(seed))[: 2_000 + POOL]
        pairs = every(root).__getitems__(rows.tolist())
        return torch.stack([x for x, _ in pairs]), torch.stack([torch.as_tensor(y) for _, y in pairs]), 2_000

    return load


def _convolutions(inputs: int, classes: int) -> nn.Module:
    def block(channels: int, filters: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, filters, 3, 2, 1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]

    layers = [*block(inputs, 16), *block(16, 32), *block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, classes))


PROBLEMS: dict[str, Problem] = {
    "wine": Problem(_table(load_wine), nn.Linear, 100),
    "cancer": Problem(_table(load_breast_cancer), nn.Linear, 100),
    "digits": Problem(
        _table(load_digits), lambda inputs, c: nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, c)), 60
    ),
    "fashion": Problem(_images(FashionMNISTDataModule), _convolutions, 12),
    "cifar": Problem(
        _images(CIFAR10DataModule), lambda inputs, classes: LeNet5(classes, in_channels=inputs, image_size=32), 15
    ),
}


class Module(LightningModule):
    """A user's classifier."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.net = network

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[batch, classes]``."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The cross-entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3, weight_decay=1e-2)


class Pool(NamedTuple):
    """Held-out examples of one fit."""

    outputs_at: Callable[[float], Tensor]  # the logits at a width, [S, N, classes]
    targets: Tensor


def fitted(problem: Problem, root: Path, seed: int, method: str) -> Pool:
    """Fit a method, and return its outputs on what the fit has not seen."""
    x, y, count = problem.load(root, seed)
    data, held_out = TensorDataset(x[:count], y[:count]), x[count:]
    network = lambda: problem.network(x.shape[1], int(y.max()) + 1)  # noqa: E731
    if method in {"user", "ensemble"}:
        members = [
            _fit(network, problem, data, seed + 1000 * member, [])[0]
            for member in range(1 if method == "user" else MEMBERS)
        ]
        logits = torch.stack([_logits(module, held_out) for module in members])
        return Pool(lambda scale: logits, y[count:])
    callback = _callback(method, seed)
    module, trainer = _fit(network, problem, data, seed, [callback])
    samples: Any = callback.find_samples(trainer, module)
    if method in {"vogn", "ivon"}:
        samples = PosteriorSamples(callback.optimizer.posterior(), SAMPLES, seed)

    @cache
    @torch.no_grad()
    def outputs_at(scale: float) -> Tensor:
        scaled: Samples = samples.scaled(scale) if method in WIDE else samples
        return scaled.outputs(module, lambda: _logits(module, held_out))

    return Pool(outputs_at, y[count:])


def _callback(method: str, seed: int) -> Any:
    if method in {"vogn", "ivon"}:
        kind = VOGNCallback if method == "vogn" else IVONCallback
        return kind(seed=seed, calibrate=False)
    if method == "laplace":
        return LaplaceCallback(linearized=False, eval_samples=SAMPLES, prior_precision="marglik", seed=seed)
    return MultiModeCallback() if method == "modes" else SWAGCallback(eval_samples=SAMPLES, seed=seed)


def _fit(network: Any, problem: Problem, data: TensorDataset, seed: int, callbacks: list[Any]) -> tuple[Module, Any]:
    seed_everything(seed, verbose=False)
    module = Module(network())
    with quiet():
        trainer = quiet_trainer(callbacks, problem.epochs)
        trainer.fit(module, DataLoader(data, 64, shuffle=True))
    return module.eval(), trainer


@torch.no_grad()
def _logits(module: Module, x: Tensor) -> Tensor:
    return torch.cat([module(part) for part in x.split(1000)])  # type: ignore[no-untyped-call]
