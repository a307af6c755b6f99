"""Base class of the image data modules: loaders, out-of-distribution sets, corrupted test images and augmentation."""

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
    """Additional test loaders and prediction data: arguments of `ImageDataModule` and its subclasses.

    Args:
        ood: Out-of-distribution sets, appended to the test loaders: folders of images, or names of registered sets such as
            ``svhn``. Their images get the transform of this data module.
        ood_root: Folder of the named sets. For torchvision data modules, the default is their own root.
        corruptions: Kinds of corruption (`lightning_bayes.zoo.corruption_kinds`). The test loaders append a corrupted copy
            of the test set for each kind and severity, after the out-of-distribution sets.
        severities: Severities of each kind; 1 to 5 by default.
        predict_dir: A folder of unlabelled images, at any depth, to predict instead of the test images.
    """

    ood: Sequence[str]
    ood_root: str | None
    corruptions: Sequence[str]
    severities: Sequence[int]
    predict_dir: str | None


class ImageLoading(ShiftedSets, total=False):
    """Loader arguments, and the additional test loaders of `ShiftedSets`.

    Args:
        batch_size: Examples per batch, in all loaders; 32 by default.
        num_workers: Worker processes per loader; 0 by default. Use about one per core to decode image files.
        ood: See `ShiftedSets`.
        ood_root: See `ShiftedSets`.
        corruptions: See `ShiftedSets`.
        severities: See `ShiftedSets`.
        predict_dir: See `ShiftedSets`.
    """

    batch_size: int
    num_workers: int


class ImageDataModule(LightningDataModule, ABC):
    """Base class of the image data modules.

    A subclass sets the input ``transform`` of all images, including out-of-distribution images, in its constructor.

    Args:
        name: Name of the data set.
        augmentation: Augmentation of the training images, or None.
        batch_size: Examples per batch, in all loaders.
        num_workers: Worker processes per loader.
        ood: Out-of-distribution sets, see `ShiftedSets`.
        ood_root: Folder of the named out-of-distribution sets.
        corruptions: Kinds of corruption of the test set, see `corruption_kinds`.
        severities: Severities of each kind.
        predict_dir: A folder of unlabelled images to predict instead of the test images.

    Raises:
        HyperparameterError: If `ood` contains this data set or duplicate names, or a corruption is unknown.
    """

    published_augmentation_factor: ClassVar[float] = 1.0  # ρ published for this data set's augmentation
    transform: ImageTransform
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
        self.ood_names = ood_names(self.ood, in_distribution=name)
        self.augmentation = augmentation
        self.shifts = [Corruption(kind, severity) for kind in corruptions for severity in severities]
        self.shift_names = tuple((shift.kind, shift.severity) for shift in self.shifts)

    @abstractmethod
    def setup(self, stage: str) -> None:
        """Set ``train_set``, ``val_set`` (empty without validation) and ``test_set``, as far as the stage needs them."""

    @property
    def data_augmentation_factor(self) -> float:
        """ρ of Osawa et al. 2019, by which callbacks multiply the number of examples N; 1 without augmentation."""
        return self.published_augmentation_factor if self.augmentation is not None else 1.0

    def train_dataloader(self) -> DataLoader[Any]:
        """The training images with their augmentation, shuffled by torch's global generator."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The validation images without augmentation; an empty list if there are none."""
        return self._loader(self.val_set) if len(self.val_set) > 0 else []  # type: ignore[arg-type]

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The test images, then the sets of ``ood_names``, then the corrupted copies of ``shift_names``, in order.

        Returns:
            One loader of ``(images, targets)``, or a list if there are more sets. Out-of-distribution targets are -1.
        """
        shifted = [self._corrupted_loader(shift) for shift in self.shifts]
        loaders = [self._loader(self.test_set), *self._ood_loaders(), *shifted]
        return loaders if len(loaders) > 1 else loaders[0]

    def predict_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The images of ``predict_dir`` if set, or else the test images and the out-of-distribution sets."""
        if self.predict_dir is not None:
            return self._loader(unlabelled_images(self.predict_dir, self.transform))
        loaders = [self._loader(self.test_set), *self._ood_loaders()]
        return loaders if len(loaders) > 1 else loaders[0]

    def _ood_loaders(self) -> list[DataLoader[Any]]:
        return [self._loader(ood_set(entry, self.ood_root, self.transform)) for entry in self.ood]

    def needs_labels(self, stage: str) -> bool:
        """Whether a stage needs the labelled images; prediction of ``predict_dir`` does not."""
        return stage != "predict" or self.predict_dir is None

    def corrupted_dataloader(self, kind: str, severity: int) -> DataLoader[Any]:
        """The test images with one of `corruption_kinds` at a severity from 1 to 5, identical in every run."""
        return self._corrupted_loader(Corruption(kind, severity))

    def _corrupted_loader(self, corruption: Corruption) -> DataLoader[Any]:
        self.setup("test")
        test = self.test_set
        return self._loader(TransformedImages(test.images, test.targets, self.transform, corruption=corruption))

    def _loader(self, dataset: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
