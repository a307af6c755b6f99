"""Base class of the torchvision data modules: loading, validation split, normalisation and augmentation.

    x = (pixel / 255 - mean) / std        mean and std per channel over the published training set

The test set is torchvision's; the validation set is a part of its training set.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset
from typing_extensions import Unpack

from lightning_bayes.errors import DataError, DatasetError, HyperparameterError
from lightning_bayes.zoo.data.base import ImageDataModule, ShiftedSets
from lightning_bayes.zoo.data.images import ImageSet, PixelMap
from lightning_bayes.zoo.data.splits import few_shots, split_indices
from lightning_bayes.zoo.transforms import ImageTransform

# torchvision's errors for missing, truncated or wrong files, and for SVHN without SciPy.
_UNREADABLE: Final = (RuntimeError, ImportError, ValueError, AssertionError, EOFError, OSError)


class VisionDataModule(ImageDataModule):
    """Base class of the data modules for torchvision image sets.

    A subclass defines the torchvision class, the expected files and the pixel statistics. Only the test loader uses
    torchvision's test set; validation is a fixed random subset of the training set. After ``setup``, ``train_set`` and
    ``val_set`` are instances of ``Subset`` with ``indices`` into the training set.

    Args:
        root: Folder that contains torchvision's files.
        download: Whether torchvision may download missing files.
        batch_size: Examples per batch, in all loaders.
        num_workers: Worker processes per loader.
        val_size: Number of training examples held out for validation; 0 trains on all examples, without validation.
        train_size: Number of remaining examples to train on, the first in a fixed random order; None uses all.
        shots: Number of training examples per class, instead of `train_size`; the first in the same order.
        augment: Whether to pad training images by 4 black pixels, crop them at random and, if mirroring preserves the class,
            mirror them at random. Callbacks then use ``data_augmentation_factor``.
        **shifts: See `ShiftedSets`. Out-of-distribution images are converted to the shape of this data set, with a message.

    Raises:
        DatasetError: In ``setup``, if the files are not below ``root``.
        DataError: In ``setup``, if the files are damaged, or the model has a different number of classes.
        HyperparameterError: If the sizes do not fit the training set, `ood` contains this data set, or a corruption is
            unknown.
    """

    expected_files: ClassVar[str]  # below root, for error messages
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    num_classes: int = 10
    in_channels: ClassVar[int]
    image_size: ClassVar[int]
    class_names: tuple[str, ...]
    mirrors: ClassVar[bool] = False  # whether mirroring preserves the class
    published_augmentation_factor: ClassVar[float] = 10.0  # Osawa et al. 2019, on CIFAR-10

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        batch_size: int = 128,
        num_workers: int = 0,
        val_size: int = 5000,
        train_size: int | None = None,
        shots: int | None = None,
        augment: bool = False,
        **shifts: Unpack[ShiftedSets],
    ) -> None:
        if shots is not None and train_size is not None:
            raise HyperparameterError(
                f"shots={shots} and train_size={train_size} are mutually exclusive. Pass only one."
            )
        augmentation = partial(crop_and_mirror, mirrors=self.mirrors) if augment else None
        shifts["ood_root"] = shifts.get("ood_root") or root
        name = type(self).__name__.removesuffix("DataModule").lower()
        transform = ImageTransform(self.image_size, self.mean, self.std)
        source = self.dataset_class.__name__
        super().__init__(name, source, transform, augmentation, batch_size, num_workers, **shifts)
        self.root = root
        self.download = download
        self.val_size = val_size
        self.train_size = train_size
        self.shots = shots

    def prepare_data(self) -> None:
        """Download missing files if `download` is set; Lightning calls this in one process only."""
        if self.download:
            for train in (True, False):
                self.dataset_class(self.root, train=train, download=True)

    def read_sets(self, stage: str) -> None:
        """Read images into memory, as uint8: the training set to fit and validate, the test set to test and predict."""
        if stage in {"fit", "validate"} and not hasattr(self, "train_set"):
            images, targets = self.read(self.root, train=True)
            train, val = split_indices(len(targets), self.val_size, self.train_size)
            if self.shots is not None:
                train = few_shots(train, targets, self.shots)
            self.train_set = Subset(self._dataset(images, targets, self.augmentation), train)
            self.val_set = Subset(self._dataset(images, targets), val)
        if stage in {"test", "predict"} and not hasattr(self, "test_set"):
            self.test_set = self._dataset(*self.read(self.root, train=False))

    @staticmethod
    @abstractmethod
    def dataset_class(root: str, train: bool, download: bool) -> Any:
        """The torchvision data set class: ``data`` and ``targets`` of its training or test set."""

    @classmethod
    def read(cls, root: str, train: bool) -> tuple[Tensor, Tensor]:
        """Read all images and labels."""
        try:
            dataset = cls.dataset_class(root, train=train, download=False)
        except _UNREADABLE as error:
            raise DatasetError(
                f"{cls.dataset_class.__name__} is missing or incomplete in {Path(root).absolute()} ({error}). Set "
                f"download=True to let the trainer or prepare_data() download it, or point root to the folder that "
                f"contains {cls.expected_files}."
            ) from error
        images, targets = _channels_first(torch.as_tensor(dataset.data)), torch.as_tensor(dataset.targets)
        problems = "; ".join(cls._problems(images, targets))
        if problems:
            raise DataError(
                f"{cls.dataset_class.__name__} in {Path(root).absolute()} has {problems}. The files are damaged or belong "
                "to another data set; download them again."
            )
        return images, targets

    @classmethod
    def test_images(cls, root: str) -> Tensor:
        """The test images ``[N, channels, height, width]``, uint8, for use as an out-of-distribution set."""
        return cls.read(root, train=False)[0]

    @classmethod
    def _problems(cls, images: Tensor, targets: Tensor) -> Iterator[str]:
        shape = (cls.in_channels, cls.image_size, cls.image_size)
        if images.shape[1:] != shape:
            yield f"images of shape {list(images.shape[1:])} instead of {list(shape)}"
        if len(images) != len(targets):
            yield f"{len(targets)} labels for {len(images)} images"
        wrong = sorted(label for label in set(targets.tolist()) if not 0 <= label < cls.num_classes)
        if wrong:
            yield f"labels {wrong} outside 0 to {cls.num_classes - 1}"

    def _dataset(self, images: Tensor, targets: Tensor, augmentation: PixelMap | None = None) -> ImageSet:
        normalize = partial(normalized, mean=self.mean, std=self.std)
        return ImageSet(images, targets, augmentation or self.transform.crop, normalize)


def normalized(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalise uint8 images as `ImageTransform.normalize` does, up to rounding, in two passes instead of three."""
    scaled_mean, scaled_std = 255 * torch.tensor(mean), 255 * torch.tensor(std)
    return (pixels - scaled_mean[:, None, None]) / scaled_std[:, None, None]


def _channels_first(images: Tensor) -> Tensor:
    if images.ndim == 3:
        return images.unsqueeze(1)
    return images if images.shape[1] in {1, 3} else images.permute(0, 3, 1, 2).contiguous()


def crop_and_mirror(images: Tensor, padding: int = 4, mirrors: bool = True) -> Tensor:
    """Pad images ``[batch, channels, height, width]`` with black, crop to the old size, and mirror, at random."""
    height, width = images.shape[-2:]
    corners = torch.randint(2 * padding + 1, (len(images), 2)).tolist()
    padded = F.pad(images, [padding] * 4)
    crops = torch.stack(
        [image[:, top : top + height, left : left + width] for image, (top, left) in zip(padded, corners, strict=True)]
    )
    is_mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(is_mirrored, crops.flip(3), crops) if mirrors else crops
