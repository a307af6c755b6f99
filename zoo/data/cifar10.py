"""CIFAR-10 (Krizhevsky 2009): 50 000 training and 10 000 colour test images, 32 × 32.

Normalised with the mean and standard deviation of its 50 000 training images, per channel.
"""

from __future__ import annotations

from typing import final

from torchvision import datasets

from lightning_bayes.zoo.data.vision import VisionDataModule
from lightning_bayes.zoo.registry import register_data


@register_data("cifar10")
@final
class CIFAR10DataModule(VisionDataModule):
    """CIFAR-10 from torchvision: images ``[batch, 3, 32, 32]``, ten classes, in ``cifar-10-batches-py``.

    See `VisionDataModule` for arguments, errors and loaders. With ``augment``, callbacks use a
    ``data_augmentation_factor`` of 10, as in Osawa et al. 2019 (https://arxiv.org/abs/1906.02506).

    Example:
        >>> data = CIFAR10DataModule(root="data", augment=True)  # reads nothing before setup
        >>> data.in_channels, data.image_size, data.data_augmentation_factor
        (3, 32, 10.0)
    """

    dataset_class = datasets.CIFAR10
    expected_files = "cifar-10-batches-py with data_batch_1 to data_batch_5, test_batch and batches.meta"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    in_channels = 3
    image_size = 32
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    mirrors = True
