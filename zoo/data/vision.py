"""What the torchvision image sets share: one place on disk, a validation split of the training set, normalisation.

x = (pixel / 255 - mean) / std        mean and std per channel, over the published training set
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_bayes.errors import DatasetError, HyperparameterError

Augmentation = Callable[[Tensor], Tensor]  # one uint8 image [channels, height, width] to another

_SPLIT_SEED: Final = 0  # a constant, so that all results are about the same split


class VisionDataModule(LightningDataModule, abc.ABC):
    """Base of the data modules on torchvision's image sets.

    A subclass names the torchvision class, the files that it expects and the statistics. The test set is
    torchvision's and is used by the test loader alone; validation is a fixed random part of the training set.
    After ``setup``, ``train_set`` and ``val_set`` are ``Subset``, with their ``indices`` into the training set.

    Args:
        root: Folder below which torchvision keeps the set.
        download: Whether torchvision may download what is missing.
        batch_size: Examples per batch, in all loaders.
        num_workers: Worker processes per loader.
        val_size: Training examples set aside for validation; 0 trains on all and does not validate.
        train_size: How many of the others to train on, the first in a fixed random order; None takes all.
    """

    dataset_class: ClassVar[type[Any]]  # a torchvision.datasets class, (root, train, download)
    expected_files: ClassVar[str]  # below root, for the error message
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    num_classes: ClassVar[int] = 10
    in_channels: ClassVar[int]
    image_size: ClassVar[int]
    class_names: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        batch_size: int = 128,
        num_workers: int = 0,
        val_size: int = 5000,
        train_size: int | None = None,
    ) -> None:
        super().__init__()
        self.root = root
        self.download = download
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.val_size = val_size
        self.train_size = train_size
        self.augmentation: Augmentation | None = None  # of the training images

    def prepare_data(self) -> None:
        """Download what is missing, if allowed; Lightning calls this in one process only."""
        if self.download:
            for train in (True, False):
                self.dataset_class(self.root, train=train, download=True)

    def setup(self, stage: str) -> None:
        """Read the images of a stage into memory, as bytes; a second call changes nothing.

        Args:
            stage: ``fit`` and ``validate`` read the training set, ``test`` and ``predict`` the test set.
        """
        if stage in {"fit", "validate"} and not hasattr(self, "train_set"):
            images, targets = self._read(train=True)
            train, val = split_indices(len(targets), self.val_size, self.train_size)
            self.train_set = Subset(self._dataset(images, targets, self.augmentation), train)
            self.val_set = Subset(self._dataset(images, targets), val)
        if stage in {"test", "predict"} and not hasattr(self, "test_set"):
            self.test_set = self._dataset(*self._read(train=False))

    def train_dataloader(self) -> DataLoader[Any]:
        """The training images, augmented where the set offers it, shuffled by torch's global generator.

        Returns:
            A loader of ``(images, targets)``.
        """
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The validation images, from the training set, never augmented.

        Returns:
            A loader of ``(images, targets)``; an empty list if ``val_size`` is 0.
        """
        return self._loader(self.val_set) if self.val_size > 0 else []

    def test_dataloader(self) -> DataLoader[Any]:
        """The test images.

        Returns:
            A loader of ``(images, targets)``.
        """
        return self._loader(self.test_set)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The loader of the test.

        Returns:
            A loader of ``(images, targets)``.
        """
        return self.test_dataloader()

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:
        try:
            dataset = self.dataset_class(self.root, train=train, download=False)
        except RuntimeError as error:  # what torchvision raises for files that are missing or damaged
            raise DatasetError(
                f"{self.dataset_class.__name__} is not below {Path(self.root).absolute()}, or not complete. Set "
                f"download=True to let trainer or prepare_data() fetch it, or point root to the folder that holds "
                f"{self.expected_files}."
            ) from error
        images = torch.as_tensor(dataset.data)
        images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        return images, torch.as_tensor(dataset.targets)

    def _dataset(self, images: Tensor, targets: Tensor, augment: Augmentation | None = None) -> NormalizedImages:
        return NormalizedImages(images, targets, self.mean, self.std, augment)

    def _loader(self, dataset: Dataset[tuple[Tensor, Tensor]], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


class NormalizedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images held as bytes, normalised when they are fetched.

    Args:
        images: ``[N, channels, height, width]``, uint8.
        targets: ``[N]``.
        mean: Per channel, on the scale [0, 1].
        std: Per channel, on the same scale.
        augment: Applied to each image by itself, before normalisation.

    Example:
        >>> black = NormalizedImages(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.arange(3), [0.5], [0.25])
        >>> black[1]
        (tensor([[[-2., -2.],
                 [-2., -2.]]]), tensor(1))
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment: Augmentation | None = None,
    ) -> None:
        self.images = images
        self.targets = targets
        self.mean = 255 * torch.tensor(mean)[:, None, None]
        self.std = 255 * torch.tensor(std)[:, None, None]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        # A DataLoader asks for a batch at once, which is an order of magnitude faster than one image after another.
        images = self.images[indices]
        if self.augment is not None:
            images = torch.stack([self.augment(image) for image in images])
        return list(zip((images - self.mean) / self.std, self.targets[indices], strict=True))


def split_indices(num_examples: int, val_size: int, train_size: int | None = None) -> tuple[list[int], list[int]]:
    """Fixed random positions for training and validation.

    Args:
        num_examples: Size of the training set.
        val_size: How many positions are for validation; the same ones whatever ``train_size`` is.
        train_size: How many positions are for training; None takes all others.

    Returns:
        Positions for training and for validation; none is in both.

    Raises:
        HyperparameterError: If the set is too small, or a size is not possible.

    Example:
        >>> train, val = split_indices(10, val_size=4)
        >>> sorted(train + val)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    left = num_examples - val_size
    if val_size < 0 or left < 1 or (train_size is not None and not 1 <= train_size <= left):
        raise HyperparameterError(
            f"val_size={val_size} and train_size={train_size} do not fit a training set of {num_examples} examples: "
            f"both come out of it, val_size from 0 and train_size from 1. Make them smaller."
        )
    order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(_SPLIT_SEED)).tolist()
    train = order[val_size:]
    return train[:train_size], order[:val_size]
