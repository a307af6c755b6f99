"""LightningDataModules, one per source; validation data always comes out of the training set."""

from __future__ import annotations

from lightning_bayes.zoo.data.cifar10 import CIFAR10DataModule
from lightning_bayes.zoo.data.digits import DigitsDataModule
from lightning_bayes.zoo.data.fashion_mnist import FashionMNISTDataModule
from lightning_bayes.zoo.data.mnist import MNISTDataModule
from lightning_bayes.zoo.data.uci import UCIDataModule

__all__ = [
    "CIFAR10DataModule",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "MNISTDataModule",
    "UCIDataModule",
]
