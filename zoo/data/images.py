"""Data sets of images, in memory or in files."""

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

PixelMap = Callable[[Tensor], Tensor]  # of uint8 images, [..., channels, height, width]

# PIL's errors for damaged files.
_UNREADABLE: Final = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


_MARKS: Final = ((b"\xff\xd8", b"\xff\xd9"), (b"\x89PNG\r\n\x1a\n", b"IEND"))  # first and last bytes of JPEG and PNG
_MAX_LISTED: Final = 20  # damaged files


@final
class ImageSet(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory or in files, transformed into model inputs on access."""

    def __init__(
        self,
        images: Tensor | Sequence[str | Path],
        targets: Tensor | Sequence[int],
        crop: PixelMap,
        normalize: PixelMap,
        corruption: Corruption | None = None,
    ) -> None:
        self.images, self.targets = images, torch.as_tensor(targets)
        self.crop, self.normalize, self.corruption = crop, normalize, corruption

    @property
    def file_names(self) -> list[str] | None:
        """Paths of the image files; None for images in memory."""
        return None if isinstance(self.images, Tensor) else [str(path) for path in self.images]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        # DataLoader calls this once per batch, which is an order of magnitude faster than one call per image.
        if isinstance(self.images, Tensor):
            pixels = self.crop(self.images[indices])
        else:
            pixels = torch.stack([self.crop(read_image(self.images[index])) for index in indices])
        if self.corruption is not None:
            pixels = torch.stack([self.corruption(*item) for item in zip(pixels, indices, strict=True)])
        return list(zip(self.normalize(pixels), self.targets[indices], strict=True))


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
    """All images below a folder, for prediction, with targets -1; raises DatasetError if there are none."""
    files = image_files(folder)
    if not files:
        raise DatasetError(
            f"predict_dir: found no images below {Path(folder).absolute()}. Supported suffixes: {', '.join(IMG_EXTENSIONS)}."
        )
    return unlabelled(files, transform)


def unlabelled(images: Tensor | Sequence[str | Path], transform: ImageTransform) -> ImageSet:
    """Images with targets -1."""
    return ImageSet(images, [-1] * len(images), transform.crop, transform.normalize)


def image_files(folder: str | Path) -> list[Path]:
    """Paths of all image files below a folder, by suffix, in alphabetical order."""
    return sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
