"""FashionMNIST (Xiao et al. 2017, https://arxiv.org/abs/1708.07747): 60 000 training and 10 000 test images, 28 × 28.

Normalised with the mean and standard deviation of its 60 000 training images.
"""

from __future__ import annotations

from typing import final

from torchvision import datasets

from lightning_bayes.zoo.data.vision import VisionDataModule
from lightning_bayes.zoo.registry import register_data


@register_data("fashion_mnist")
@final
class FashionMNISTDataModule(VisionDataModule):
    """FashionMNIST from torchvision: images ``[batch, 1, 28, 28]``, ten kinds of clothing, in ``FashionMNIST/raw``.

    See `VisionDataModule` for arguments, errors and loaders.

    Example:
        >>> data = FashionMNISTDataModule(root="data", batch_size=64, train_size=1000)  # reads nothing before setup
        >>> data.in_channels, data.image_size
        (1, 28)
    """

    dataset_class = datasets.FashionMNIST
    expected_files = (
        "FashionMNIST/raw/{train,t10k}-images-idx3-ubyte and FashionMNIST/raw/{train,t10k}-labels-idx1-ubyte, unpacked"
    )
    mean = (0.2860,)
    std = (0.3530,)
    in_channels = 1
    image_size = 28
    class_names = tuple(datasets.FashionMNIST.classes)
    mirrors = True
