"""LightningDataModules, one per source. Validation data never comes from the test set.

Importing this package imports every file, which registers its data module.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from lightning_bayes.zoo.data.corruptions import SEVERITIES, Corruption, corruption_kinds
from lightning_bayes.zoo.data.digits import DigitsDataModule
from lightning_bayes.zoo.data.image_folder import ImageFolderDataModule
from lightning_bayes.zoo.data.torchvision_sets import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    KMNISTDataModule,
    MNISTDataModule,
    SVHNDataModule,
)
from lightning_bayes.zoo.data.uci import UCIDataModule

__all__ = [
    "SEVERITIES",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "Corruption",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "ImageFolderDataModule",
    "KMNISTDataModule",
    "MNISTDataModule",
    "SVHNDataModule",
    "UCIDataModule",
    "corruption_kinds",
]

for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)
