"""Images in one folder per class: own pictures, or ImageNet as it is usually unpacked.

    root/train/CLASS/*.jpg   root/val/CLASS/*.jpg   root/test/CLASS/*.jpg        folders of sets
    root/CLASS/*.jpg                                                             one folder, split here

With folders of sets, `val` is the validation set only if there is a `test` folder as well; otherwise it is the test set, as
with ImageNet, and validation is a part of the training images.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar, TypeAlias, final

from lightning_utilities.core.rank_zero import rank_zero_info
from torchvision import transforms
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from typing_extensions import Unpack

from lightning_bayes.errors import DataError, DatasetError
from lightning_bayes.zoo.data.agreement import check_classes, hand_over
from lightning_bayes.zoo.data.base import ImageDataModule, ImageLoading
from lightning_bayes.zoo.data.images import Augmentation, TransformedImages
from lightning_bayes.zoo.data.splits import few_shots, stratified_split
from lightning_bayes.zoo.registry import register_data
from lightning_bayes.zoo.transforms import IMAGENET_MEAN, IMAGENET_STD, ImageTransform, with_channels

_TRAIN, _VAL, _TEST = "train", "val", "test"
_Samples: TypeAlias = list[tuple[str, int]]  # path and class


@register_data("image_folder")
@final
class ImageFolderDataModule(ImageDataModule):
    """Images in class folders; the defaults are the input of torchvision's weights for ImageNet.

    Images are read on demand, resized, cropped, normalised, and converted between grey and colour as `mean` requires.
    After `setup`, ``class_names`` are the names of the class folders in alphabetical order.

    Args:
        root: The folder, laid out as in the module's description.
        image_size: Height and width of the model's input in pixels.
        resize: Length of an image's shorter side before the central crop; None takes `image_size`.
        mean: The mean of the pixels in [0, 1]: three numbers for colour, or one, which makes all images grey.
        std: Standard deviations, likewise.
        val_size: Training images set aside for validation, the same share of each class: below 1 a share, else a number. Not
            used where there are folders for validation and test.
        test_size: The same for the test, used only if the class folders lie in the root itself.
        shots: How many training images of each class to train on, the first in a fixed random order; None takes all.
        augment: Whether training images are random crops of a part of the image, resized, and mirrored at random. The
            callbacks then take this module's ``data_augmentation_factor``.
        **loading: See `ImageLoading`.

    Raises:
        DatasetError: In ``setup``, if there are no class folders, or one of them is empty.
        DataError: In ``setup``, if the folders of the sets, or the model, have other classes; when a batch is fetched, if a
            file is damaged.
        HyperparameterError: If the sizes leave no image of a class for training.

    Example:
        >>> data = ImageFolderDataModule(root="pictures", image_size=64, resize=72)  # reads nothing before setup
        >>> data.transform.image_size
        64
    """

    published_augmentation_factor: ClassVar[float] = 5.0  # Osawa et al. 2019, on ImageNet
    composed_values: ClassVar[dict[str, int | None]] = {"num_classes": None, "in_channels": 3, "image_size": 224}
    test_set: TransformedImages

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
        **loading: Unpack[ImageLoading],
    ) -> None:
        self._transform = ImageTransform(image_size, tuple(mean), tuple(std), resize)
        augmentation = _crop_and_mirror(image_size, len(mean)) if augment else None
        super().__init__(Path(root).name, augmentation, **loading)
        self.root = Path(root)
        self.val_size, self.test_size = val_size, test_size
        self.shots = shots
        self.mean, self.std = self._transform.mean, self._transform.std
        self.image_size, self.in_channels = image_size, len(mean)
        self.class_names: tuple[str, ...] = ()

    @property
    def transform(self) -> ImageTransform:
        """The input transform of the model."""
        return self._transform

    @property
    def num_classes(self) -> int:
        """The number of class folders, known after `setup`."""
        return len(self.class_names)

    @classmethod
    def count_classes(cls, root: str) -> int:
        """The number of class folders, before anything is built for them.

        Args:
            root: The folder.

        Returns:
            The number. A folder without class folders is a `DatasetError`.
        """
        train = Path(root) / _TRAIN
        return len(_read_folder(train if train.is_dir() else Path(root))[0])

    def setup(self, stage: str) -> None:
        """List the files and split them; no image is read yet, and a second call changes nothing.

        Args:
            stage: A prediction of ``predict_dir`` reads no class folders; the others do not differ.
        """
        if not self.needs_labels(stage):
            return
        if not self.class_names:
            self._split()
        check_classes(self.trainer, self.num_classes, self.class_names, str(self.root.absolute()))
        if stage == "fit":
            hand_over(self.trainer, self.transform, self.class_names)

    def _split(self) -> None:
        nested = (self.root / _TRAIN).is_dir()
        class_names, samples = _read_folder(self.root / _TRAIN if nested else self.root)
        has_test = (self.root / _TEST).is_dir()
        if nested:
            test = self._read_like_train(_TEST if has_test else _VAL, class_names)
        else:
            samples, test = _set_aside(samples, self.test_size)
        if nested and has_test and (self.root / _VAL).is_dir():
            train, val = samples, self._read_like_train(_VAL, class_names)
        else:
            train, val = _set_aside(samples, self.val_size)
        if self.shots is not None:
            order = stratified_split([target for _, target in train], 0)[0]
            train = [train[i] for i in few_shots(order, [target for _, target in train], self.shots)]
        self.train_set = self._images(train, self.augmentation)
        self.val_set, self.test_set = self._images(val), self._images(test)
        rank_zero_info(
            f"{self.root.absolute()}: {len(class_names)} classes, {len(train)} images for training, {len(val)} for "
            f"validation, {len(test)} for the test."
        )
        self.class_names = class_names  # last: without them, `setup` tries again

    def _read_like_train(self, folder: str, class_names: tuple[str, ...]) -> _Samples:
        names, samples = _read_folder(self.root / folder)
        missing = [name for name in class_names if name not in names]
        unknown = [name for name in names if name not in class_names]
        if missing or unknown:
            raise DataError(
                f"{(self.root / folder).absolute()} must have the class folders of {_TRAIN}; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}."
            )
        return samples

    def _images(self, samples: _Samples, augment: Augmentation | None = None) -> TransformedImages:
        return TransformedImages([path for path, _ in samples], [t for _, t in samples], self.transform, augment)


def _read_folder(folder: Path) -> tuple[tuple[str, ...], _Samples]:
    """Names of the class folders, and the path and class of each image."""
    try:
        names, index = find_classes(folder)
        samples: _Samples = make_dataset(folder, index, IMG_EXTENSIONS)
    except FileNotFoundError as error:
        raise DatasetError(
            f"{folder.absolute()} does not hold one folder of images for each class ({error}). Put the images into "
            f"ROOT/CLASS, or into ROOT/{_TRAIN}/CLASS and ROOT/{_VAL}/CLASS, and remove empty folders."
        ) from error
    if {_VAL, _TEST} & set(names):
        raise DatasetError(f"{folder.absolute()} has a folder {_VAL} or {_TEST}, but no folder {_TRAIN} beside it.")
    return tuple(names), samples


def _set_aside(samples: _Samples, size: float) -> tuple[_Samples, _Samples]:
    share = size if size < 1 else size / len(samples)
    stay, aside = stratified_split([target for _, target in samples], share)
    return [samples[i] for i in stay], [samples[i] for i in aside]


def _crop_and_mirror(image_size: int, channels: int) -> Augmentation:
    """The training images of torchvision's weights: a crop of 8 to 100 % of the area, resized; half are mirrored."""
    steps = [transforms.RandomResizedCrop(image_size, antialias=True), transforms.RandomHorizontalFlip()]
    augmentation: Augmentation = transforms.Compose([partial(with_channels, channels=channels), *steps])
    return augmentation
