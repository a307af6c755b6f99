"""The base of the image data modules: loaders, sets out of distribution, corrupted test images, augmentation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypedDict

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from lightning_bayes.zoo.data.corruptions import SEVERITIES, Corruption
from lightning_bayes.zoo.data.images import Augmentation, NormalizedImages, TransformedImages, unlabelled_images
from lightning_bayes.zoo.data.ood import ood_names, ood_set
from lightning_bayes.zoo.transforms import ImageTransform


class ShiftedSets(TypedDict, total=False):
    """Additional test loaders and the data to predict: arguments of `ImageDataModule` and its subclasses.

    Args:
        ood: Sets out of distribution that the test loaders append: folders of images, or names of registered sets
            (``svhn``). Their images go through the transform of this set.
        ood_root: Folder of the named ones; that of torchvision's sets is their own root by default.
        corruptions: Kinds of corruption (`lightning_bayes.zoo.corruption_kinds`) of which the test loaders append copies of
            the test set, after the sets out of distribution.
        severities: Severities of each kind; 1 to 5 by default.
        predict_dir: A folder of images without labels, at any depth, to predict in the place of the test images.
    """

    ood: Sequence[str]
    ood_root: str | None
    corruptions: Sequence[str]
    severities: Sequence[int]
    predict_dir: str | None


class ImageLoading(ShiftedSets, total=False):
    """How images are loaded, and which sets the test loaders append.

    Args:
        batch_size: Examples per batch, in all loaders; 32 by default.
        num_workers: Worker processes per loader; none by default. Decoding image files takes about one per core.
        ood: See `ShiftedSets`.
        ood_root: See there.
        corruptions: See there.
        severities: See there.
        predict_dir: See there.
    """

    batch_size: int
    num_workers: int


class ImageDataModule(LightningDataModule, ABC):
    """Base of the data modules on images.

    A subclass fills ``train_set``, ``val_set`` (empty without validation) and ``test_set`` in `setup`. It defines the
    ``transform`` of its images.

    Args:
        name: Name of the set.
        augmentation: The augmentation of the training images; None for none.
        batch_size: Examples per batch, in all loaders.
        num_workers: Worker processes per loader.
        ood: Sets out of distribution, see `ood_names`.
        ood_root: Folder of the named ones.
        corruptions: Kinds of corrupted copies of the test set that the test appends, see `corruption_kinds`.
        severities: Severities of each kind.
        predict_dir: A folder of images without labels to predict in the place of the test images.

    Raises:
        HyperparameterError: If `ood` names this set or two sets alike, or there is no such corruption.
    """

    published_augmentation_factor: ClassVar[float] = 1.0  # ρ of the papers for this set's augmentation
    train_set: Dataset[Any]
    val_set: Dataset[Any]
    test_set: NormalizedImages | TransformedImages

    def __init__(
        self,
        name: str,
        augmentation: Augmentation | None,
        batch_size: int = 32,
        num_workers: int = 0,
        ood: Sequence[str] = (),
        ood_root: str | None = None,
        corruptions: Sequence[str] = (),
        severities: Sequence[int] = SEVERITIES,
        predict_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.predict_dir = predict_dir
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.ood, self.ood_root = tuple(ood), ood_root or "data"
        self.ood_names = ood_names(self.ood, own=name)
        self.augmentation = augmentation
        self.shifts = [Corruption(kind, severity) for kind in corruptions for severity in severities]
        self.shift_names = tuple((shift.kind, shift.severity) for shift in self.shifts)

    @property
    @abstractmethod
    def transform(self) -> ImageTransform:
        """The input transform of all images, in distribution and out of it."""

    def corrupted_set(self, corruption: Corruption) -> TransformedImages:
        """The test images with a corruption.

        Args:
            corruption: Applied to each image after the crop, before normalisation.

        Returns:
            The set.
        """
        self.setup("test")
        return TransformedImages(self.test_set.images, self.test_set.targets, self.transform, corruption=corruption)

    @property
    def data_augmentation_factor(self) -> float:
        """ρ of Osawa et al. 2019 for this augmentation, 1 without: callbacks count N examples as ρN."""
        return self.published_augmentation_factor if self.augmentation is not None else 1.0

    def train_dataloader(self) -> DataLoader[Any]:
        """The training images, augmented if requested, shuffled by torch's global generator.

        Returns:
            A loader of ``(images, targets)``.
        """
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The validation images, never augmented.

        Returns:
            A loader of ``(images, targets)``; an empty list if there are none.
        """
        return self._loader(self.val_set) if len(self.val_set) > 0 else []  # type: ignore[arg-type]

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The test images, then the sets of ``ood_names``, then the corrupted copies of ``shift_names``, in their order.

        Returns:
            One loader of ``(images, targets)``, or with more sets a list; out of distribution the targets are -1.
        """
        shifted = [self._loader(self.corrupted_set(shift)) for shift in self.shifts]
        known = [self._loader(self.test_set), *self._ood_loaders(), *shifted]
        return known if len(known) > 1 else known[0]

    def predict_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The images of ``predict_dir``; else the test images and the sets out of distribution.

        Returns:
            As `test_dataloader`, without corrupted copies.
        """
        if self.predict_dir is not None:
            return self._loader(unlabelled_images(self.predict_dir, self.transform))
        known = [self._loader(self.test_set), *self._ood_loaders()]
        return known if len(known) > 1 else known[0]

    def _ood_loaders(self) -> list[DataLoader[Any]]:
        return [self._loader(ood_set(entry, self.ood_root, self.transform)) for entry in self.ood]

    def needs_labels(self, stage: str) -> bool:
        """Whether a stage reads the labelled images; a prediction of ``predict_dir`` does not.

        Args:
            stage: The stage.

        Returns:
            Whether it does.
        """
        return stage != "predict" or self.predict_dir is None

    def corrupted_dataloader(self, kind: str, severity: int) -> DataLoader[Any]:
        """The test images with a corruption, the same in every run.

        Args:
            kind: See `corruption_kinds`.
            severity: 1 to 5.

        Returns:
            A loader of ``(images, targets)``.
        """
        return self._loader(self.corrupted_set(Corruption(kind, severity)))

    def _loader(self, dataset: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
