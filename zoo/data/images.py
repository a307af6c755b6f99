"""Image data sets: uint8 images in memory or image files, transformed into model inputs on access."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, final

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

from lightning_bayes.errors import DataError, DatasetError
from lightning_bayes.zoo.data.corruptions import Corruption
from lightning_bayes.zoo.transforms import ImageTransform, as_tensor

Augmentation = Callable[[Tensor], Tensor]  # on uint8 images

# PIL's errors for damaged files.
_UNREADABLE: Final = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


@final
class NormalizedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images stored as uint8 and normalised on access.

    Args:
        images: ``[N, channels, height, width]``, uint8.
        targets: ``[N]``.
        mean: Mean per channel, on the scale [0, 1].
        std: Standard deviation per channel, on the scale [0, 1].
        augment: Applied to a uint8 batch ``[B, channels, height, width]``, before normalisation.

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
        # DataLoader calls this once per batch, which is an order of magnitude faster than one call per image.
        images = self.images[indices]
        if self.augment is not None:
            images = self.augment(images)
        return list(zip((images - self.mean) / self.std, self.targets[indices], strict=True))


@final
class TransformedImages(Dataset[tuple[Tensor, int]]):
    """Images of any size, in memory or in files, transformed into model inputs one by one.

    Args:
        images: uint8 images ``[N, channels, height, width]``, or paths of image files.
        targets: One class per image.
        transform: Crops and normalises.
        augment: Replaces the crop: maps one uint8 image to a uint8 image of the model's shape.
        corruption: Applied to the cropped uint8 image, before normalisation.
    """

    def __init__(
        self,
        images: Tensor | Sequence[str | Path],
        targets: Tensor | Sequence[int],
        transform: ImageTransform,
        augment: Augmentation | None = None,
        corruption: Corruption | None = None,
    ) -> None:
        self.images, self.targets = images, targets
        self.transform, self.augment, self.corruption = transform, augment, corruption

    @property
    def file_names(self) -> list[str] | None:
        """Paths of the image files; None for images in memory."""
        return None if isinstance(self.images, Tensor) else [str(path) for path in self.images]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        pixels = image if isinstance(image, Tensor) else read_image(image)
        cropped = self.transform.crop(pixels) if self.augment is None else self.augment(pixels)
        if self.corruption is not None:
            cropped = self.corruption(cropped, index)
        return self.transform.normalize(cropped), int(self.targets[index])


def read_image(path: str | Path) -> Tensor:
    """Read an image file as uint8, ``[1 or 3, height, width]``; raises DataError if it is damaged or not an image."""
    try:
        with Image.open(path) as image:
            return as_tensor(image)
    except _UNREADABLE as error:
        raise DataError(
            f"{path} cannot be read as an image ({type(error).__name__}: {error}). Replace the file, or remove it."
        ) from error


def unlabelled_images(folder: str | Path, transform: ImageTransform) -> TransformedImages:
    """All images below a folder, for prediction, with targets -1; raises DatasetError if there are none."""
    files = image_files(folder)
    if not files:
        raise DatasetError(
            f"predict_dir: found no images below {Path(folder).absolute()}. Supported suffixes: {', '.join(IMG_EXTENSIONS)}."
        )
    return TransformedImages(files, [-1] * len(files), transform)


def image_files(folder: str | Path) -> list[Path]:
    """Paths of all image files below a folder, by suffix, in alphabetical order."""
    return sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
