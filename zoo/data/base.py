"""Base class of the image data modules: loaders, out-of-distribution sets, corrupted test images and augmentation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import torch
from lightning.pytorch import LightningDataModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Unpack

from lightning_bayes.errors import DataError, DatasetError, HyperparameterError
from lightning_bayes.zoo.create import attach_to_models
from lightning_bayes.zoo.data.corruptions import SEVERITIES, Corruption
from lightning_bayes.zoo.data.images import (
    ImageSet,
    PixelMap,
    image_files,
    read_image,
    unlabelled,
    unlabelled_images,
)
from lightning_bayes.zoo.registry import DATA
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


class ImageDataModule(LightningDataModule, ABC):
    """Base class of the image data modules.

    Args:
        name: Name of the data set, which `ood` must not contain.
        source: Name or folder of the data set in messages.
        transform: Input transform of all images, including out-of-distribution images.
        augmentation: Augmentation of the training images, or None.
        batch_size: Examples per batch, in all loaders.
        num_workers: Worker processes per loader.
        **shifts: See `ShiftedSets`.

    Raises:
        HyperparameterError: If `ood` contains this data set or duplicate names, or a corruption is unknown.
    """

    published_augmentation_factor: ClassVar[float] = 1.0  # ρ published for this data set's augmentation
    class_names: tuple[str, ...]
    num_classes: int
    train_set: Dataset[Any]
    val_set: Dataset[Any]
    test_set: Dataset[Any]

    def __init__(
        self,
        name: str,
        source: str,
        transform: ImageTransform,
        augmentation: PixelMap | None,
        batch_size: int,
        num_workers: int,
        **shifts: Unpack[ShiftedSets],
    ) -> None:
        super().__init__()
        self.source, self.transform, self.augmentation = source, transform, augmentation
        self.batch_size, self.num_workers = batch_size, num_workers
        self.predict_dir = shifts.get("predict_dir")
        self.ood, self.ood_root = tuple(shifts.get("ood", ())), shifts.get("ood_root") or "data"
        self.ood_names = ood_names(self.ood, in_distribution=name)
        severities = shifts.get("severities", SEVERITIES)
        corruptions = [Corruption(kind, severity) for kind in shifts.get("corruptions", ()) for severity in severities]
        self.shift_names = tuple((corruption.kind, corruption.severity) for corruption in corruptions)

    def setup(self, stage: str) -> None:
        """Read and split the data, and compare its classes with the model's. Repeated calls read nothing."""
        self.check_classes()
        if stage != "predict" or self.predict_dir is None:
            self.read_sets(stage)
            self.check_classes()  # reading a folder is what finds its classes
        if stage == "fit":
            attach_to_models(self.trainer, self.transform, self.class_names)

    def check_classes(self) -> None:
        """Raise DataError if the trainer's module has a ``num_classes`` other than the data's, once that is known."""
        model_classes = getattr(getattr(self.trainer, "lightning_module", None), "num_classes", self.num_classes)
        if self.class_names and model_classes != self.num_classes:
            raise DataError(
                f"{self.source} has {self.num_classes} classes ({', '.join(self.class_names)}), but the model has "
                f"num_classes={model_classes}. Pass num_classes={self.num_classes} to the module and its network."
            )

    @abstractmethod
    def read_sets(self, stage: str) -> None:
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
        """Loaders of the test images, the sets of ``ood_names``, whose targets are -1, and the copies of ``shift_names``."""
        shifted = [self.corrupted_dataloader(*shift) for shift in self.shift_names]
        return _one_or_all([*self._test_and_ood_loaders(), *shifted])

    def predict_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The images of ``predict_dir`` if set, or else the test images and the out-of-distribution sets."""
        if self.predict_dir is not None:
            return self._loader(unlabelled_images(self.predict_dir, self.transform))
        return _one_or_all(self._test_and_ood_loaders())

    def read_ood_sets(self) -> Sequence[Dataset[Any]]:
        """The out-of-distribution sets, in the order of ``ood_names``."""
        return [ood_set(entry, self.ood_root, self.transform) for entry in self.ood]

    def corrupted_dataloader(self, kind: str, severity: int) -> DataLoader[Any]:
        """The test images with one of `corruption_kinds` at a severity from 1 to 5, identical in every run."""
        self.setup("test")
        test = self.test_set
        if not isinstance(test, ImageSet):
            raise DataError(
                f"{self.source} has no test images of eight bits, which corruptions need. Use another data set."
            )
        crop, normalize = self.transform.crop, self.transform.normalize
        return self._loader(ImageSet(test.images, test.targets, crop, normalize, Corruption(kind, severity)))

    def _test_and_ood_loaders(self) -> list[DataLoader[Any]]:
        return [self._loader(dataset) for dataset in (self.test_set, *self.read_ood_sets())]

    def _loader(self, dataset: Dataset[Any], shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def _one_or_all(loaders: list[DataLoader[Any]]) -> DataLoader[Any] | list[DataLoader[Any]]:
    return loaders if len(loaders) > 1 else loaders[0]


def _plain(name: str) -> str:
    return name.replace("_", "")


def ood_names(entries: Iterable[str], in_distribution: str) -> tuple[str, ...]:
    """Names of the out-of-distribution sets in metric keys."""
    names = tuple(Path(entry).name for entry in entries)
    if len(set(names)) < len(names) or _plain(in_distribution) in map(_plain, names):
        raise HyperparameterError(
            f"ood={list(entries)} must contain sets other than {in_distribution}, with unique names. Rename a folder, or "
            "remove a set."
        )
    return names


def ood_set(entry: str, root: str, transform: ImageTransform) -> ImageSet:
    """The images of an out-of-distribution set, with targets -1."""
    registered = {_plain(name): module for name, module in sorted(DATA.items()) if hasattr(module, "test_images")}
    if _plain(entry) in registered:
        images: Tensor | list[Path] = registered[_plain(entry)].test_images(root)
    else:
        images = image_files(entry)
    if len(images) == 0:
        raise DatasetError(
            f"ood: {entry} is neither a registered set ({', '.join(registered)}) nor a folder with images. No images were "
            f"found below {Path(entry).absolute()}."
        )
    first = images[0] if isinstance(images, Tensor) else read_image(images[0])
    input_shape = [len(transform.mean), transform.image_size, transform.image_size]
    if list(first.shape) != input_shape:
        rank_zero_info(
            f"The images of {entry} (the first is {list(first.shape)}) are resized, cropped and converted to the shape of "
            f"the training images, {input_shape}."
        )
    return unlabelled(images, transform)
