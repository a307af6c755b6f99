"""Models, data modules and tasks to start from. A callback of this package makes them Bayesian.

Example:
    >>> from lightning_bayes.zoo import BayesClassifier, LeNet5
    >>> task = BayesClassifier(LeNet5(num_classes=10, image_size=8), num_classes=10)
"""

from __future__ import annotations

from lightning_bayes.zoo.create import architecture, create_model, input_transform, list_models
from lightning_bayes.zoo.data import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    Corruption,
    DigitsDataModule,
    FashionMNISTDataModule,
    ImageFolderDataModule,
    KMNISTDataModule,
    MNISTDataModule,
    SVHNDataModule,
    UCIDataModule,
    corruption_kinds,
)
from lightning_bayes.zoo.hub import from_hub, posterior_folder, push_to_hub
from lightning_bayes.zoo.models import MLP, VGG16, AlexNet, LeNet5, ResNet18
from lightning_bayes.zoo.posterior_file import SavedPosterior, load, save_posterior
from lightning_bayes.zoo.registry import register_data, register_model
from lightning_bayes.zoo.tasks import BayesClassifier, BayesRegressor, CosineToEnd
from lightning_bayes.zoo.transforms import ImageTransform

__all__ = [
    "MLP",
    "VGG16",
    "AlexNet",
    "BayesClassifier",
    "BayesRegressor",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "Corruption",
    "CosineToEnd",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "ImageFolderDataModule",
    "ImageTransform",
    "KMNISTDataModule",
    "LeNet5",
    "MNISTDataModule",
    "ResNet18",
    "SVHNDataModule",
    "SavedPosterior",
    "UCIDataModule",
    "architecture",
    "corruption_kinds",
    "create_model",
    "from_hub",
    "input_transform",
    "list_models",
    "load",
    "posterior_folder",
    "push_to_hub",
    "register_data",
    "register_model",
    "save_posterior",
]
