"""MNIST, handwritten digits (LeCun, Cortes & Burges): 60 000 training and 10 000 test images, greyscale, 28 × 28.

Normalised with the mean and standard deviation of its 60 000 training images.
"""

from __future__ import annotations

from typing import final

from torchvision import datasets

from lightning_bayes.zoo.data.vision import VisionDataModule
from lightning_bayes.zoo.registry import register_data


@register_data("mnist")
@final
class MNISTDataModule(VisionDataModule):
    """MNIST from torchvision: images ``[batch, 1, 28, 28]``, ten digits, in ``MNIST/raw``.

    See `VisionDataModule` for arguments, errors and loaders.

    Example:
        >>> data = MNISTDataModule(root="data", batch_size=64, train_size=1000)  # reads nothing before setup
        >>> data.in_channels, data.image_size
        (1, 28)
    """

    dataset_class = datasets.MNIST
    expected_files = "MNIST/raw/{train,t10k}-images-idx3-ubyte and MNIST/raw/{train,t10k}-labels-idx1-ubyte, unpacked"
    mean = (0.1307,)
    std = (0.3081,)
    in_channels = 1
    image_size = 28
    class_names = tuple("0123456789")
