"""The base of the torchvision image sets: one place on disk, a validation split of the training set, normalisation.

x = (pixel / 255 - mean) / std        mean and std per channel, over the published training set
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
from lightning_bayes.zoo.data.agreement import check_classes, hand_over
from lightning_bayes.zoo.data.base import ImageDataModule, ShiftedSets
from lightning_bayes.zoo.data.images import Augmentation, NormalizedImages
from lightning_bayes.zoo.data.splits import few_shots, split_indices
from lightning_bayes.zoo.transforms import ImageTransform

# Torchvision's errors for files that are missing, truncated or of another kind, and for SVHN without SciPy.
_UNREADABLE: Final = (RuntimeError, ImportError, ValueError, AssertionError, EOFError, OSError)


class VisionDataModule(ImageDataModule):
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
        shots: How many of each class to train on, instead of `train_size`; the first of each in the same order.
        augment: Whether training images are cropped at random from a 4-pixel black frame and, where a mirrored image
            still shows its class, mirrored at random. The callbacks then take this module's ``data_augmentation_factor``.
        **shifts: See `ShiftedSets`. Images out of distribution are brought to the shape of this set, with a message.

    Raises:
        DatasetError: In ``setup``, if the files are not below ``root``.
        DataError: In ``setup``, if the files are damaged, or the model has another number of classes.
        HyperparameterError: If the sizes do not fit the training set, `ood` names this set, or there is no such corruption.
    """

    expected_files: ClassVar[str]  # below root, for the error message
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    num_classes: ClassVar[int] = 10
    in_channels: ClassVar[int]
    image_size: ClassVar[int]
    class_names: ClassVar[tuple[str, ...]]
    mirrors: ClassVar[bool] = False  # whether a mirrored image still shows its class
    published_augmentation_factor: ClassVar[float] = 10.0  # Osawa et al. 2019, on CIFAR-10
    test_set: NormalizedImages

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
                f"shots={shots} and train_size={train_size} exclude each other. Pass one of them."
            )
        augmentation = partial(crop_and_mirror, mirrors=self.mirrors) if augment else None
        shifts["ood_root"] = shifts.get("ood_root") or root
        super().__init__(_name_of(type(self)), augmentation, batch_size, num_workers, **shifts)
        self.root = root
        self.download = download
        self.val_size = val_size
        self.train_size = train_size
        self.shots = shots

    @property
    def transform(self) -> ImageTransform:
        """No resizing for this set's own images; others are brought to their size."""
        return ImageTransform(self.image_size, self.mean, self.std)

    def prepare_data(self) -> None:
        """Download what is missing, if allowed; Lightning calls this in one process only."""
        if self.download:
            for train in (True, False):
                self.open(self.root, train, download=True)

    def setup(self, stage: str) -> None:
        """Read the images of a stage into memory, as bytes; a second call changes nothing.

        Args:
            stage: ``fit`` and ``validate`` read the training set, ``test`` and ``predict`` the test set.
        """
        check_classes(self.trainer, self.num_classes, self.class_names, self.dataset_class.__name__)
        if stage == "fit":
            hand_over(self.trainer, self.transform, self.class_names)
        if stage in {"fit", "validate"} and not hasattr(self, "train_set"):
            images, targets = self.read(self.root, train=True)
            train, val = split_indices(len(targets), self.val_size, self.train_size)
            if self.shots is not None:
                train = few_shots(train, targets, self.shots)
            self.train_set = Subset(self._dataset(images, targets, self.augmentation), train)
            self.val_set = Subset(self._dataset(images, targets), val)
        if stage in {"test", "predict"} and self.needs_labels(stage) and not hasattr(self, "test_set"):
            self.test_set = self._dataset(*self.read(self.root, train=False))

    @staticmethod
    @abstractmethod
    def dataset_class(root: str, train: bool, download: bool) -> Any:
        """A class of torchvision.datasets."""

    @classmethod
    def open(cls, root: str, train: bool, download: bool = False) -> Any:
        """The torchvision data set.

        Args:
            root: Folder below which it lies.
            train: Whether the training set, or the test set.
            download: Whether it may be downloaded.

        Returns:
            The data set.
        """
        return cls.dataset_class(root, train=train, download=download)

    @classmethod
    def read(cls, root: str, train: bool) -> tuple[Tensor, Tensor]:
        """All images and classes.

        Args:
            root: Folder below which the set lies.
            train: Whether the training set, or the test set.

        Returns:
            Bytes ``[N, channels, height, width]`` and classes ``[N]``.

        Raises:
            DatasetError: If the files are missing or not complete.
            DataError: If the images have another shape, or the labels another number or range, than those of the set.
        """
        try:
            dataset = cls.open(root, train)
        except _UNREADABLE as error:
            raise DatasetError(
                f"{cls.dataset_class.__name__} is not below {Path(root).absolute()}, or not complete ({error}). Set "
                f"download=True to let trainer or prepare_data() fetch it, or point root to the folder that holds "
                f"{cls.expected_files}."
            ) from error
        images, targets = _channels_first(torch.as_tensor(dataset.data)), torch.as_tensor(cls.labels(dataset))
        faults = "; ".join(cls._faults(images, targets))
        if faults:
            raise DataError(
                f"{cls.dataset_class.__name__} below {Path(root).absolute()} has {faults}. The files are damaged or belong "
                "to another set; fetch them again."
            )
        return images, targets

    @classmethod
    def test_images(cls, root: str) -> Tensor:
        """The test images, for other sets to be compared with.

        Args:
            root: Folder below which the set lies.

        Returns:
            Bytes ``[N, channels, height, width]``.
        """
        return cls.read(root, train=False)[0]

    @classmethod
    def _faults(cls, images: Tensor, targets: Tensor) -> Iterator[str]:
        shape = (cls.in_channels, cls.image_size, cls.image_size)
        if images.shape[1:] != shape:
            yield f"images of shape {list(images.shape[1:])}, but they should have {list(shape)}"
        if len(images) != len(targets):
            yield f"{len(targets)} labels for {len(images)} images"
        wrong = sorted(label for label in set(targets.tolist()) if not 0 <= label < cls.num_classes)
        if wrong:
            yield f"the labels {wrong}, but its classes are 0 to {cls.num_classes - 1}"

    @staticmethod
    def labels(dataset: Any) -> Any:
        """The classes of a torchvision data set.

        Args:
            dataset: The data set.

        Returns:
            One class per example.
        """
        return dataset.targets

    def _dataset(self, images: Tensor, targets: Tensor, augment: Augmentation | None = None) -> NormalizedImages:
        return NormalizedImages(images, targets, self.mean, self.std, augment)


def _name_of(module: type[Any]) -> str:
    return module.__name__.removesuffix("DataModule").lower()


def _channels_first(images: Tensor) -> Tensor:
    if images.ndim == 3:
        return images.unsqueeze(1)
    return images if images.shape[1] in {1, 3} else images.permute(0, 3, 1, 2).contiguous()


def crop_and_mirror(images: Tensor, padding: int = 4, mirrors: bool = True) -> Tensor:
    """Crop each image at random from itself in a black frame, and mirror every other one; torch's global generator.

    Args:
        images: ``[batch, channels, height, width]``.
        padding: Width of the frame in pixels.
        mirrors: Whether to mirror.

    Returns:
        Images of the same shape.
    """
    height, width = images.shape[-2:]
    corners = torch.randint(2 * padding + 1, (len(images), 2)).tolist()
    framed = F.pad(images, [padding] * 4)
    crops = torch.stack(
        [image[:, top : top + height, left : left + width] for image, (top, left) in zip(framed, corners, strict=True)]
    )
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(mirrored, crops.flip(3), crops) if mirrors else crops
