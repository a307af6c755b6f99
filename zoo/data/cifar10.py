"""CIFAR-10 (Krizhevsky 2009): 50 000 training and 10 000 test images in colour, 32 × 32.

Normalised with the mean and standard deviation of its 50 000 training images, per channel.
"""

from __future__ import annotations

from typing import final

from torchvision import datasets, transforms

from lightning_bayes.zoo.data.vision import VisionDataModule


@final
class CIFAR10DataModule(VisionDataModule):
    """CIFAR-10 through torchvision; images ``[batch, 3, 32, 32]``, ten classes.

    Args:
        root: Folder that holds, or will hold, ``cifar-10-batches-py``.
        download: Whether torchvision may download what is missing.
        batch_size: Examples per batch, in all loaders.
        num_workers: Worker processes per loader.
        val_size: Training examples set aside for validation; 0 trains on all and does not validate.
        train_size: How many of the others to train on, the first in a fixed random order; None takes all.
        augment: Whether training images are cropped at random from a 4-pixel black frame and mirrored at random. VOGN
            then wants a ``data_augmentation_factor``, 10 in Osawa et al. 2019.

    Raises:
        DatasetError: In ``setup``, if the files are not below ``root``.
        HyperparameterError: In ``setup``, if ``val_size`` or ``train_size`` do not fit the training set.

    Example:
        >>> data = CIFAR10DataModule(root="data", augment=True)  # reads nothing before setup
        >>> data.in_channels, data.image_size
        (3, 32)
    """

    dataset_class = datasets.CIFAR10
    expected_files = "cifar-10-batches-py with data_batch_1 to data_batch_5, test_batch and batches.meta"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    in_channels = 3
    image_size = 32
    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        batch_size: int = 128,
        num_workers: int = 0,
        val_size: int = 5000,
        train_size: int | None = None,
        augment: bool = False,
    ) -> None:
        super().__init__(root, download, batch_size, num_workers, val_size, train_size)
        if augment:
            self.augmentation = transforms.Compose(
                [
                    transforms.RandomCrop(self.image_size, padding=4),
                    transforms.RandomHorizontalFlip(),
                ]
            )
