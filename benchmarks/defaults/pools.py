"""Small problems with many held-out examples, and the outputs of a fit at any width of its posterior.

`DEVELOPMENT` decided between shrinkage and a test. Tables of scikit-learn, with a third for training: *wine* and *cancer*
(linear), *digits* (MLP). Images, with 2,000 for training: *fashion* (a convolutional network with BatchNorm) and *cifar*
(LeNet-5). `FRESH` chose nothing: *svhn* (LeNet-5), *mnist-noisy* (an MLP; a fifth of all labels are random), and UCI's sets:
*quality* (the grades of wine as classes), *concrete* and *kin8nm* (regressions). The user's optimizer is AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer, seed_everything
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.defaults.users import UserModule, fit, outputs_of
from lightning_bayes import IVONCallback, LaplaceCallback, MultiModeCallback, SWAGCallback, VOGNCallback
from lightning_bayes.predictive import PosteriorSamples, Samples
from lightning_bayes.zoo import MLP, CIFAR10DataModule, FashionMNISTDataModule, LeNet5, MNISTDataModule
from lightning_bayes.zoo.data.uci import Standardiser, read_uci

SAMPLES, MEMBERS = 10, 3
IMAGES, POOL = 2_000, 2_300  # for training, and held out
NOISE = 0.2  # of the labels are random
WIDE = ("vogn", "ivon", "swag", "laplace")  # methods whose posterior has a width
METHODS = (*("user", "ensemble", "modes"), *WIDE)
Load = Callable[[Path, int], tuple[Tensor, Tensor, int]]  # inputs and targets, the first so many for training


class Problem(NamedTuple):
    """A data set, its network and the length of its fit."""

    load: Load  # from root and seed, which draws the order of the examples
    network: Callable[[int, int], nn.Module]  # of the numbers of inputs or channels and of outputs
    epochs: int


def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _table(read: Any) -> Load:
    def load(root: Path, seed: int) -> tuple[Tensor, Tensor, int]:
        data = read()
        x = torch.tensor((data.data - data.data.mean(0)) / (data.data.std(0) + 1e-6), dtype=torch.float32)
        order = _order(len(x), seed)
        return x[order], torch.tensor(data.target)[order], len(x) // 3

    return load


def _uci(name: str, has_classes: bool = False) -> Load:
    def load(root: Path, seed: int) -> tuple[Tensor, Tensor, int]:
        inputs, targets, _ = read_uci(root / "uci", name)
        order = _order(len(inputs), seed)[: 2 * POOL]
        count = min(len(order) // 3, IMAGES)
        train = order[:count]
        x, y = Standardiser.fit(inputs[train]).apply(inputs), Standardiser.fit(targets[train]).apply(targets)
        y = (targets - targets.min()).long() if has_classes else y.float()[:, None]
        return x[order].float(), y[order], count

    return load


def _images(module_class: Any) -> Load:
    @cache
    def every(root: Path) -> Any:
        module = module_class(root=str(root), val_size=0, train_size=40_000)
        module.setup("fit")
        return module.train_set

    def load(root: Path, seed: int) -> tuple[Tensor, Tensor, int]:
        pairs = every(root).__getitems__(_order(40_000, seed)[: IMAGES + POOL].tolist())
        return torch.stack([x for x, _ in pairs]), torch.stack([torch.as_tensor(y) for _, y in pairs]), IMAGES

    return load


def _noisy(load: Load) -> Load:
    def noisy(root: Path, seed: int) -> tuple[Tensor, Tensor, int]:
        x, y, count = load(root, seed)
        generator = torch.Generator().manual_seed(seed)
        is_noisy = torch.rand(len(y), generator=generator) < NOISE
        return x, torch.where(is_noisy, torch.randint(int(y.max()) + 1, y.shape, generator=generator), y), count

    return noisy


def _svhn(root: Path, seed: int) -> tuple[Tensor, Tensor, int]:
    from scipy.io import loadmat  # SVHN's format

    numbers = loadmat(str(root / "test_32x32.mat"))
    order = _order(numbers["y"].size, seed)[: IMAGES + POOL]
    x = torch.tensor(numbers["X"]).permute(3, 2, 0, 1)[order] / 255
    return (x - 0.45) / 0.2, torch.tensor(numbers["y"]).flatten()[order].long() % 10, IMAGES


def _convolutions(inputs: int, classes: int) -> nn.Module:
    def block(channels: int, filters: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, filters, 3, 2, 1, bias=False), nn.BatchNorm2d(filters), nn.ReLU()]

    layers = [*block(inputs, 16), *block(16, 32), *block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, classes))


def _lenet(channels: int, classes: int) -> nn.Module:
    return LeNet5(classes, in_channels=channels, image_size=32)


def _mlp(hidden: int) -> Callable[[int, int], nn.Module]:
    return lambda inputs, outputs: MLP(inputs, outputs, hidden=(hidden,))


DEVELOPMENT: dict[str, Problem] = {
    "wine": Problem(_table(load_wine), nn.Linear, 100),
    "cancer": Problem(_table(load_breast_cancer), nn.Linear, 100),
    "digits": Problem(_table(load_digits), _mlp(64), 60),
    "fashion": Problem(_images(FashionMNISTDataModule), _convolutions, 12),
    "cifar": Problem(_images(CIFAR10DataModule), _lenet, 15),
}
FRESH: dict[str, Problem] = {
    "quality": Problem(_uci("wine", has_classes=True), _mlp(50), 100),
    "mnist-noisy": Problem(_noisy(_images(MNISTDataModule)), lambda _, c: MLP(784, c, hidden=(100,)), 15),
    "svhn": Problem(_svhn, _lenet, 20),
    "concrete": Problem(_uci("concrete"), _mlp(50), 100),
    "kin8nm": Problem(_uci("kin8nm"), _mlp(50), 30),
}
PROBLEMS, REGRESSIONS = {**DEVELOPMENT, **FRESH}, ("concrete", "kin8nm")


class Pool(NamedTuple):
    """Held-out examples of one fit."""

    outputs_at: Callable[[float], Tensor]  # the outputs at a width, [S, N, classes] or [S, N, 1]
    targets: Tensor


def held_out(problem: Problem, root: Path, seed: int, method: str) -> Pool:
    """Fit a method, and return its outputs on what the fit has not seen."""
    x, y, count = problem.load(root, seed)
    data, rest = TensorDataset(x[:count], y[:count]), x[count:]
    outputs = 1 if y.is_floating_point() else int(y.max()) + 1
    loss = F.mse_loss if y.is_floating_point() else F.cross_entropy

    def fitted(seed: int, *callbacks: Callback) -> tuple[UserModule, Trainer]:
        seed_everything(seed, verbose=False)
        module = UserModule(problem.network(x.shape[1], outputs), _adamw, loss)
        return module, fit(module, data, 64, problem.epochs, callbacks)

    if method in {"user", "ensemble"}:
        count = MEMBERS if method == "ensemble" else 1
        networks = torch.stack([outputs_of(fitted(seed + 1000 * member)[0], rest) for member in range(count)])
        return Pool(lambda scale: networks, y[-len(rest) :])
    callback = _callback(method, seed)
    module, trainer = fitted(seed, callback)
    samples: Any = callback.find_samples(trainer, module)
    if method in {"vogn", "ivon"}:
        samples = PosteriorSamples(callback.optimizer.posterior(), SAMPLES, seed)

    @cache
    @torch.no_grad()
    def outputs_at(scale: float) -> Tensor:
        scaled: Samples = samples.scaled(scale) if method in WIDE else samples
        return scaled.outputs(module, lambda: outputs_of(module, rest))

    return Pool(outputs_at, y[-len(rest) :])


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 1e-3, weight_decay=1e-2)


def _callback(method: str, seed: int) -> Any:
    if method in {"vogn", "ivon"}:
        kind = VOGNCallback if method == "vogn" else IVONCallback
        return kind(seed=seed, calibrate=False)
    if method == "laplace":
        return LaplaceCallback(linearized=False, eval_samples=SAMPLES, prior_precision="marglik", seed=seed)
    return MultiModeCallback() if method == "modes" else SWAGCallback(eval_samples=SAMPLES, seed=seed)
