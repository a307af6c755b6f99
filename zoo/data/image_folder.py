"""Images in one folder per class: your own images, or ImageNet in its usual layout.

    root/train/CLASS/*.jpg   root/val/CLASS/*.jpg   root/test/CLASS/*.jpg        one folder per split
    root/CLASS/*.jpg                                                             split automatically

Splits have their usual names in any case (`SPLITS`), perhaps with further words, as ``test_set``; a folder with only one
folder inside is entered. Without a folder for the test, as with ImageNet, the validation images are the test set, and
validation images are split from the training images.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeAlias, final

from lightning_utilities.core.rank_zero import rank_zero_info
from torchvision import transforms
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset
from typing_extensions import Unpack

from lightning_bayes.errors import DataError, DatasetError
from lightning_bayes.zoo.data.base import ImageDataModule, ShiftedSets
from lightning_bayes.zoo.data.images import ImageSet, PixelMap, require_whole
from lightning_bayes.zoo.data.splits import few_shots, stratified_split
from lightning_bayes.zoo.registry import register_data
from lightning_bayes.zoo.transforms import IMAGENET_MEAN, IMAGENET_STD, ImageTransform, with_channels

SPLITS: Final = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval"),
    "test": ("test", "testing"),
}
_SPLIT_OF: Final = {name: split for split, names in SPLITS.items() for name in names}
_Samples: TypeAlias = list[tuple[str, int]]  # (path, class)


@register_data("image_folder")
@final
class ImageFolderDataModule(ImageDataModule):
    """Images in class folders. The defaults match the input of torchvision's ImageNet weights.

    Images are read on demand, resized, cropped, normalised, and converted to greyscale or colour depending on `mean`. After
    `setup`, ``class_names`` contains the names of the class folders in alphabetical order.

    Args:
        root: The folder, in one of the layouts of the module docstring.
        image_size: Height and width of the model's input in pixels.
        resize: Length of the shorter side before the centre crop; None uses `image_size`.
        mean: Pixel mean on the scale [0, 1]: three numbers for colour, one for greyscale.
        std: Pixel standard deviation, with as many numbers as `mean`.
        val_size: Training images to hold out for validation, stratified by class: a fraction if below 1, otherwise a number.
            Unused if there are folders for validation and test.
        test_size: Images to hold out for the test, in the same units. Used only if `root` contains the class folders.
        shots: Number of training images per class, the first in a fixed random order; None uses all.
        augment: Whether to use random resized crops and random mirroring in training. Callbacks then use
            ``data_augmentation_factor``.
        batch_size: Examples per batch, in all loaders.
        num_workers: Worker processes per loader. Use about one per core to decode image files.
        **shifts: See `ShiftedSets`.

    Raises:
        DatasetError: In ``setup``, if there are no class folders, a class folder is empty, or folders of splits are missing.
        DataError: In ``setup``, if the classes of the splits or the model differ, or files are truncated or no images; all
            such files are listed.
        HyperparameterError: If the sizes leave no training images of a class.
    """

    published_augmentation_factor: ClassVar[float] = 5.0  # Osawa et al. 2019, on ImageNet
    composed_values: ClassVar[dict[str, int | None]] = {"num_classes": None, "in_channels": 3, "image_size": 224}

    def __init__(
        self,
        root: str = "data",
        image_size: int = 224,
        resize: int | None = 256,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        val_size: float = 0.1,
        test_size: float = 0.2,
        shots: int | None = None,
        augment: bool = False,
        batch_size: int = 32,
        num_workers: int = 0,
        **shifts: Unpack[ShiftedSets],
    ) -> None:
        transform = ImageTransform(image_size, tuple(mean), tuple(std), resize)
        augmentation = _crop_and_mirror(image_size, len(mean)) if augment else None
        self.root = Path(root)
        source = str(self.root.absolute())
        super().__init__(self.root.name, source, transform, augmentation, batch_size, num_workers, **shifts)
        self.val_size, self.test_size = val_size, test_size
        self.shots = shots
        self.mean, self.std = transform.mean, transform.std
        self.image_size, self.in_channels = image_size, len(mean)
        self.class_names: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:  # type: ignore[override]  # counted, not assigned
        """The number of class folders; 0 before `setup`."""
        return len(self.class_names)

    @classmethod
    def count_classes(cls, root: str) -> int:
        """The number of class folders below `root`, for the command line; raises DatasetError if there are none."""
        return len(_read_folder(_layout(Path(root))[0])[0])

    def read_sets(self, stage: str) -> None:
        """List and split the files without reading images; all stages are equivalent."""
        if self.class_names:
            return
        train_folder, val_folder, test_folder = _layout(self.root)
        class_names, train = _read_folder(train_folder)
        train, test = _split(train, self.test_size, test_folder, class_names)
        train, val = _split(train, self.val_size, val_folder, class_names)
        require_whole([path for path, _ in (*train, *val, *test)])
        if self.shots is not None:
            targets = [target for _, target in train]
            order, _ = stratified_split(targets, 0)
            train = [train[i] for i in few_shots(order, targets, self.shots)]
        self.train_set = self._images(train, self.augmentation)
        self.val_set, self.test_set = self._images(val), self._images(test)
        rank_zero_info(
            f"{self.source}: {len(class_names)} classes, {len(train)} training images, {len(val)} validation "
            f"images, {len(test)} test images."
        )
        self.class_names = class_names  # set last, so that `setup` can be repeated after an error

    def _images(self, samples: _Samples, augmentation: PixelMap | None = None) -> ImageSet:
        paths, targets = [path for path, _ in samples], [target for _, target in samples]
        return ImageSet(paths, targets, augmentation or self.transform.crop, self.transform.normalize)


def _visible_folders(folder: Path) -> list[Path]:
    """The folders inside, without hidden ones and the one that macOS adds to archives."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in inside if path.is_dir() and not path.name.startswith((".", "__MACOSX"))]


def _layout(root: Path) -> tuple[Path, Path | None, Path | None]:
    """The folders of the training, validation and test images; None for a set that is split from the training images."""
    folders = _visible_folders(root)
    named = {path: split for path in folders if (split := _split_of(path)) is not None}
    by_split = {split: _entered(path) for path, split in named.items() if _visible_folders(path)}
    if not by_split and set(named.values()) <= {"train"}:  # "train" can be a class
        if len(folders) == 1 and _visible_folders(folders[0]):
            return _layout(folders[0])
        if not _have_same_folders(folders):
            return root, None, None
    if "train" not in by_split or len(by_split) < len(named):
        raise DatasetError(
            f"The folders in {root.absolute()} are {', '.join(path.name for path in folders)}. Splits need one folder "
            f"called {' or '.join(SPLITS['train'])}, at most one for validation ({', '.join(SPLITS['val'])}) and one for "
            f"the test ({', '.join(SPLITS['test'])}), each with one folder of images per class. Rename or move the others; "
            "unlabelled images are predicted with predict_dir."
        )
    if others := [path.name for path in folders if path not in named]:
        rank_zero_info(f"{root.absolute()}: the folders {', '.join(others)} are no splits and are not read.")
    train, val, test = by_split["train"], by_split.get("val"), by_split.get("test")
    return (train, None, val) if test is None else (train, val, test)


def _split_of(path: Path) -> str | None:
    """The split of a folder's name, or of a word in the name of a folder of folders, such as ``test_set``."""
    name = path.name.lower()
    words = re.split(r"[^a-z]+", name) if _visible_folders(path) else []
    splits = {_SPLIT_OF[word] for word in (name, *words) if word in _SPLIT_OF}
    return splits.pop() if len(splits) == 1 else None


def _entered(folder: Path) -> Path:
    """The folder, or the one that it wraps, as in ``train/train/CLASS``."""
    inside = _visible_folders(folder)
    return _entered(inside[0]) if len(inside) == 1 and _visible_folders(inside[0]) else folder


def _have_same_folders(folders: list[Path]) -> bool:
    """Whether several folders hold the same folders, as the parts of a data set do and classes do not."""
    inside = [{path.name for path in _visible_folders(folder)} for folder in folders]
    return len(inside) > 1 and bool(inside[0]) and all(names == inside[0] for names in inside)


def _read_folder(folder: Path) -> tuple[tuple[str, ...], _Samples]:
    """The names of the class folders, and the path and class of each image."""
    names = [path.name for path in _visible_folders(folder)]
    try:
        samples: _Samples = make_dataset(folder, {name: index for index, name in enumerate(names)}, IMG_EXTENSIONS)
    except (FileNotFoundError, ValueError) as error:  # a class without images, or no classes
        raise DatasetError(
            f"{folder.absolute()} does not contain one folder of images per class ({error}). Put the images into "
            "ROOT/CLASS, or into ROOT/train/CLASS and ROOT/val/CLASS, and remove empty folders."
        ) from error
    return tuple(names), samples


def _split(
    train: _Samples, size: float, folder: Path | None, class_names: tuple[str, ...]
) -> tuple[_Samples, _Samples]:
    """The remaining training images, and the images of a folder; without a folder, `size` of the training images."""
    if folder is None:
        fraction = size if size < 1 else size / len(train)
        remaining, held_out = stratified_split([target for _, target in train], fraction)
        return [train[i] for i in remaining], [train[i] for i in held_out]
    names, samples = _read_folder(folder)
    missing = [name for name in class_names if name not in names]
    unknown = [name for name in names if name not in class_names]
    if missing or unknown:
        raise DataError(
            f"{folder.absolute()} must have the same class folders as the training images; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}."
        )
    return train, samples


def _crop_and_mirror(image_size: int, channels: int) -> PixelMap:
    """Torchvision's ImageNet augmentation: a resized crop of 8 to 100 % of the area, mirrored with probability ½."""
    steps = [transforms.RandomResizedCrop(image_size, antialias=True), transforms.RandomHorizontalFlip()]
    augmentation: PixelMap = transforms.Compose([partial(with_channels, channels=channels), *steps])
    return augmentation
