"""Kuzushiji-MNIST (Clanuwat et al. 2018, https://arxiv.org/abs/1812.01718): old Japanese characters in MNIST's format.

60 000 training and 10 000 test images, greyscale, 28 × 28. The mean and standard deviation are commonly used values, not
computed from the files. Other code uses 0.1904 and 0.3475, which differ by less than 1 %.
"""

from __future__ import annotations

from typing import final

from torchvision import datasets

from lightning_bayes.zoo.data.vision import VisionDataModule
from lightning_bayes.zoo.registry import register_data


@register_data("kmnist")
@final
class KMNISTDataModule(VisionDataModule):
    """KMNIST from torchvision: images ``[batch, 1, 28, 28]``, ten characters, in ``KMNIST/raw``.

    See `VisionDataModule` for arguments, errors and loaders.

    Example:
        >>> data = KMNISTDataModule(root="data", ood=("mnist",))  # reads nothing before setup
        >>> data.class_names[0], data.ood_names
        ('o', ('mnist',))
    """

    dataset_class = datasets.KMNIST
    expected_files = "KMNIST/raw/{train,t10k}-images-idx3-ubyte and KMNIST/raw/{train,t10k}-labels-idx1-ubyte, unpacked"
    mean = (0.1918,)
    std = (0.3483,)
    in_channels = 1
    image_size = 28
    class_names = tuple(datasets.KMNIST.classes)
