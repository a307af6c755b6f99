"""Eleven standard problems: small and large data, with and without BatchNorm, classification and regression.

Out-of-distribution images get the transform of the training images: letters (notMNIST) for digits,
clothing (FashionMNIST) for MNIST, and handwritten digits (MNIST) for clothing. All are resized by average pooling.

`--root` contains torchvision's folders (``MNIST``, ``FashionMNIST``, ``cifar-10-batches-py``), the UCI sets with the
standard splits in ``uci`` (see `lightning_bayes.zoo.data.uci`), LIBSVM's sets in ``logreg`` (see
`benchmarks.papers.logistic.model`), and the test images of ``notMNIST`` in MNIST's format. Without notMNIST, the digits have
no out-of-distribution images.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.defaults.mode_problems import resnet
from benchmarks.papers.logistic.model import halves, read
from lightning_bayes.zoo import (
    MLP,
    CIFAR10DataModule,
    DigitsDataModule,
    FashionMNISTDataModule,
    LeNet5,
    MNISTDataModule,
)
from lightning_bayes.zoo.data.base import ood_set
from lightning_bayes.zoo.data.uci import Standardiser, read_uci
from lightning_bayes.zoo.models.norms import NormName

TEST_IMAGES = 5000  # of the ten thousand in each test set


class Data(NamedTuple):
    """Training and test set; regression data are standardised with the training set."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    ood_x: Tensor | None = None  # out-of-distribution images


@dataclass(frozen=True)
class Problem:
    """A data set with the network and the training schedule."""

    load: Callable[[Path, int], Data]  # from root and seed, which selects the split if there are several
    network: Callable[[Data], nn.Module]
    batch: int
    epochs: int
    is_regression: bool = False

    def chance(self, data: Data) -> float:
        """Error of the best constant prediction."""
        if self.is_regression:
            return float((data.test_y - data.train_y.mean()).square().mean().sqrt())
        return 1 - float(data.test_y.bincount().max() / len(data.test_y))


def _digits(per_class: int | None) -> Callable[[Path, int], Data]:
    def load(root: Path, seed: int) -> Data:
        module = DigitsDataModule(eval_ood=False)
        module.setup("fit")
        x, y = module.train_set.tensors
        if per_class is not None:
            x, y = _first_of_each_class(x, y, per_class)
        letters = _letters(root)
        ood_x = (
            None if letters is None else (F.adaptive_avg_pool2d(letters, module.image_size) - module.mean) / module.std
        )
        return Data(x, y, *module.test_set.tensors, ood_x)

    return load


def _letters(root: Path) -> Tensor | None:
    """The first half of the test images of notMNIST, in [0, 1]."""
    path = root / "notMNIST" / "t10k-images-idx3-ubyte.gz"
    if not path.exists():
        return None
    pixels = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=16)
    return torch.tensor(pixels.reshape(-1, 1, 28, 28)[:TEST_IMAGES]) / 255


def _first_of_each_class(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    chosen = torch.cat([(y == label).nonzero().flatten()[:count] for label in y.unique()])
    return x[chosen], y[chosen]


def _images(module_class: Any, ood: str | None = None, train_size: int = 10_000) -> Callable[[Path, int], Data]:
    def load(root: Path, seed: int) -> Data:
        module = module_class(root=str(root), val_size=0, train_size=train_size)
        module.setup("fit")
        module.setup("test")
        train_x, train_y = _tensors(module.train_set)
        test_x, test_y = _tensors(module.test_set, TEST_IMAGES)
        ood_x = None if ood is None else _tensors(ood_set(ood, str(root), module.transform), TEST_IMAGES)[0]
        return Data(train_x, train_y, test_x, test_y, ood_x)

    return load


def _tensors(dataset: Any, limit: int | None = None) -> tuple[Tensor, Tensor]:
    rows = range(min(limit or len(dataset), len(dataset)))
    pairs = dataset.__getitems__(list(rows)) if hasattr(dataset, "__getitems__") else [dataset[row] for row in rows]
    return torch.stack([x for x, _ in pairs]), torch.stack([torch.as_tensor(y) for _, y in pairs])


def _uci(name: str) -> Callable[[Path, int], Data]:
    def load(root: Path, seed: int) -> Data:
        inputs, targets, splits = read_uci(root / "uci", name)
        train, test = splits[seed]
        columns, numbers = Standardiser.fit(inputs[train]), Standardiser.fit(targets[train])
        x, y = columns.apply(inputs).float(), numbers.apply(targets).float()
        return Data(x[train], y[train], x[test], y[test])

    return load


def _logistic(name: str) -> Callable[[Path, int], Data]:
    def load(root: Path, seed: int) -> Data:
        x, y = read(name, root / "logreg", ("X", "y"))
        parts = halves(x, y, np.random.default_rng(seed))
        train_x, train_y, test_x, test_y = (torch.as_tensor(part) for part in parts)
        return Data(train_x.float(), train_y.long(), test_x.float(), test_y.long())

    return load


def _mlp(*hidden: int) -> Callable[[Data], nn.Module]:
    def build(data: Data) -> nn.Module:
        classes = int(data.train_y.max()) + 1 if data.train_y.dtype == torch.long else 1
        return MLP(data.train_x[0].numel(), classes, hidden=hidden)

    return build


def _lenet(data: Data, norm: NormName = "none") -> nn.Module:
    _, channels, _, size = data.train_x.shape
    return LeNet5(num_classes=10, in_channels=channels, image_size=size, norm=norm)


def _resnet(data: Data) -> nn.Module:
    return resnet(nn.BatchNorm2d, is_normed_beside=False)


PROBLEMS: dict[str, Problem] = {
    "digits": Problem(_digits(None), _lenet, batch=32, epochs=40),
    "digits-100": Problem(_digits(10), _lenet, batch=32, epochs=100),
    "mnist-mlp": Problem(_images(MNISTDataModule, "fashionmnist"), _mlp(100), batch=64, epochs=15),
    "fashion-lenet": Problem(_images(FashionMNISTDataModule, "mnist"), _lenet, batch=64, epochs=12),
    "fashion-lenet-bn": Problem(
        _images(FashionMNISTDataModule, "mnist", 2_000), partial(_lenet, norm="batch"), batch=64, epochs=12
    ),
    "cifar-lenet": Problem(_images(CIFAR10DataModule), _lenet, batch=64, epochs=15),
    "cifar-resnet": Problem(_images(CIFAR10DataModule), _resnet, batch=64, epochs=10),
    "yacht": Problem(_uci("yacht"), _mlp(50), batch=32, epochs=100, is_regression=True),
    "concrete": Problem(_uci("concrete"), _mlp(50), batch=32, epochs=60, is_regression=True),
    "energy": Problem(_uci("energy"), _mlp(50), batch=32, epochs=60, is_regression=True),
    "australian": Problem(_logistic("australian"), _mlp(), batch=32, epochs=60),
    "breast-cancer": Problem(_logistic("breast-cancer"), _mlp(), batch=32, epochs=60),
}
