"""Street View House Numbers (Netzer et al. 2011): 73 257 training and 26 032 colour test images, 32 × 32.

Normalised with the mean and standard deviation of its training images, per channel. torchvision needs SciPy to read it.
SVHN is a common out-of-distribution set for CIFAR-10.
"""

from __future__ import annotations

from typing import final

from torchvision import datasets

from lightning_bayes.zoo.data.vision import VisionDataModule
from lightning_bayes.zoo.registry import register_data


class SVHN(datasets.SVHN):  # type: ignore[misc]  # torchvision has no types
    """SVHN with the constructor and the name of the labels of torchvision's other sets."""

    def __init__(self, root: str, train: bool, download: bool) -> None:
        super().__init__(root, split="train" if train else "test", download=download)
        self.targets = self.labels


@register_data("svhn")
@final
class SVHNDataModule(VisionDataModule):
    """SVHN from torchvision: images ``[batch, 3, 32, 32]``, ten digits, in two MATLAB files.

    See `VisionDataModule` for arguments, errors and loaders.

    Example:
        >>> data = SVHNDataModule(root="data", batch_size=64)  # reads nothing before setup
        >>> data.in_channels, data.image_size
        (3, 32)
    """

    dataset_class = SVHN
    expected_files = "train_32x32.mat and test_32x32.mat, and install SciPy (pip install scipy)"
    mean = (0.4377, 0.4438, 0.4728)
    std = (0.1980, 0.2010, 0.1970)
    in_channels = 3
    image_size = 32
    class_names = tuple("0123456789")
