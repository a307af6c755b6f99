"""Data sets of images, in memory or in files."""

from __future__ import annotations

import math
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

PixelMap = Callable[[Tensor], Tensor]  # of uint8 images, [..., channels, height, width]

# PIL's errors for damaged files.
_UNREADABLE: Final = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


_NO_IMAGE: Final = torch.zeros(3, 8, 8, dtype=torch.uint8)  # cropped to the size of the input, then NaN
_MARKS: Final = ((b"\xff\xd8", b"\xff\xd9"), (b"\x89PNG\r\n\x1a\n", b"IEND"))  # first and last bytes of JPEG and PNG
_MAX_LISTED: Final = 20  # damaged files


@final
class ImageSet(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory or in files, transformed into model inputs on access.

    With `keeps_unreadable`, a file that cannot be read becomes an input of NaN, and so a prediction of NaN.
    """

    def __init__(
        self,
        images: Tensor | Sequence[str | Path],
        targets: Tensor | Sequence[int],
        crop: PixelMap,
        normalize: PixelMap,
        corruption: Corruption | None = None,
        keeps_unreadable: bool = False,
    ) -> None:
        self.images, self.targets = images, torch.as_tensor(targets)
        self.crop, self.normalize, self.corruption = crop, normalize, corruption
        self.keeps_unreadable = keeps_unreadable

    @property
    def file_names(self) -> list[str] | None:
        """Paths of the image files; None for images in memory."""
        return None if isinstance(self.images, Tensor) else [str(path) for path in self.images]

    def error_of(self, index: int) -> str:
        """Why a file cannot be read as an image; empty if it can."""
        try:
            if not isinstance(self.images, Tensor):
                read_image(self.images[index])
        except DataError as error:
            return f"{type(error.__cause__).__name__}: {error.__cause__}"
        return ""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        # DataLoader calls this once per batch, which is an order of magnitude faster than one call per image.
        read = [] if isinstance(self.images, Tensor) else [self._read(index) for index in indices]
        if isinstance(self.images, Tensor):
            pixels = self.crop(self.images[indices])
        else:
            pixels = torch.stack([self.crop(_NO_IMAGE if image is None else image) for image in read])
        if self.corruption is not None:
            pixels = torch.stack([self.corruption(*item) for item in zip(pixels, indices, strict=True)])
        inputs = self.normalize(pixels)
        for row, image in zip(inputs, read, strict=False):
            if image is None:
                row.fill_(math.nan)
        return list(zip(inputs, self.targets[indices], strict=True))

    def _read(self, index: int) -> Tensor | None:
        """The image of a file; None if it cannot be read and is kept."""
        try:
            return read_image(self.images[index])  # type: ignore[arg-type]
        except DataError:
            if not self.keeps_unreadable:
                raise
            return None


def read_image(path: str | Path) -> Tensor:
    """Read an image file as uint8, ``[1 or 3, height, width]``; raises DataError if it is damaged or not an image."""
    try:
        with Image.open(path) as image:
            return as_tensor(image)
    except _UNREADABLE as error:
        raise DataError(
            f"{path} cannot be read as an image ({type(error).__name__}: {error}). Replace the file, or remove it."
        ) from error


def require_whole(paths: Sequence[str | Path]) -> None:
    """Raise DataError that lists every file which is truncated or no image. Only files without an end mark are decoded."""
    damaged = []
    for path in map(Path, paths):
        try:
            if not _has_end_mark(path):
                read_image(path)
        except DataError as error:
            damaged.append(str(error.__cause__ and f"{path} ({error.__cause__})"))
    if damaged:
        listed = "\n  ".join(damaged[:_MAX_LISTED])
        more = f"\n  and {len(damaged) - _MAX_LISTED} more" if len(damaged) > _MAX_LISTED else ""
        raise DataError(
            f"{len(damaged)} of {len(paths)} files cannot be read as images. Replace or remove them:\n  {listed}{more}"
        )


def _has_end_mark(path: Path) -> bool:
    """Whether a file begins and ends as a JPEG or PNG does, which takes microseconds to see."""
    with path.open("rb") as file:
        head = file.read(8)
        file.seek(max(path.stat().st_size - 1024, 0))
        tail = file.read()
    return any(head.startswith(start) and end in tail for start, end in _MARKS)


def unlabelled_images(folder: str | Path, transform: ImageTransform) -> ImageSet:
    """All images below a folder, also unreadable ones, for prediction, with targets -1; raises DatasetError without any."""
    files = image_files(folder)
    if not files:
        raise DatasetError(
            f"predict_dir: found no images below {Path(folder).absolute()}. Supported suffixes: {', '.join(IMG_EXTENSIONS)}."
        )
    return unlabelled(files, transform, keeps_unreadable=True)


def unlabelled(
    images: Tensor | Sequence[str | Path], transform: ImageTransform, keeps_unreadable: bool = False
) -> ImageSet:
    """Images with targets -1."""
    targets = [-1] * len(images)
    return ImageSet(images, targets, transform.crop, transform.normalize, keeps_unreadable=keeps_unreadable)


def image_files(folder: str | Path) -> list[Path]:
    """Paths of all image files below a folder, by suffix, in alphabetical order."""
    return sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
