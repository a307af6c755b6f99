"""Image transforms: convert an image to the channels, size and scale that the weights were trained with.

    x = (pixel / 255 - mean) / std        after resizing the shorter side and cropping the centre

Images are cropped as bytes and normalised as floats.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)  # RGB, on the scale [0, 1]
IMAGENET_STD: Final = (0.229, 0.224, 0.225)


@final
@dataclass(frozen=True)
class ImageTransform:
    """Resizes, crops the centre, converts to the number of channels of `mean` and normalises.

    All fields are plain values, so that a posterior file can store the transform.

    Args:
        image_size: Height and width of the result in pixels.
        mean: Mean per channel, on the scale [0, 1].
        std: Standard deviation per channel, on the same scale.
        resize: Length of the shorter side before the crop; None uses `image_size`.
        interpolation: Resizing mode: ``"bilinear"``, ``"bicubic"`` or ``"nearest"``.

    Raises:
        HyperparameterError: If the values are inconsistent.
    """

    image_size: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    resize: int | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        """Check the values."""
        modes = [mode.value for mode in InterpolationMode]
        if self.interpolation not in modes:
            raise HyperparameterError(
                f"interpolation={self.interpolation!r} is unknown; use one of {', '.join(modes)}."
            )
        if self.image_size < 1 or (self.resize or self.image_size) < self.image_size:
            raise HyperparameterError(
                f"resize={self.resize} and image_size={self.image_size} are inconsistent: the image is resized and then "
                "cropped to image_size. image_size must be positive and resize at least as large."
            )
        if len(self.mean) not in {1, 3} or len(self.std) != len(self.mean) or min(self.std) <= 0:
            raise HyperparameterError(
                f"mean={self.mean} and std={self.std} must each have one entry for greyscale or three for colour, and each "
                "std must be positive."
            )

    def __call__(self, image: Any) -> Tensor:
        """Transform an image into the model's input."""
        return self.normalize(self.crop(image))

    def crop(self, image: Any) -> Tensor:
        """Resize and crop to ``[..., len(mean), image_size, image_size]`` without normalisation, in the image's dtype."""
        pixels = with_channels(as_tensor(image), len(self.mean))
        if pixels.shape[-2:] == (self.image_size, self.image_size) and self.resize in {None, self.image_size}:
            return pixels
        mode = InterpolationMode(self.interpolation)
        resized = functional.resize(pixels, [self.resize or self.image_size], interpolation=mode, antialias=True)
        cropped: Tensor = functional.center_crop(resized, [self.image_size, self.image_size])
        return cropped

    def normalize(self, pixels: Tensor) -> Tensor:
        """(x - mean) / std per channel, of uint8 or of floats in [0, 1], ``[..., len(mean), height, width]``."""
        scaled = pixels if pixels.is_floating_point() else pixels / 255
        mean, std = scaled.new_tensor(self.mean), scaled.new_tensor(self.std)
        return (scaled - mean[:, None, None]) / std[:, None, None]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; ``ImageTransform(**values)`` is the inverse."""
        return asdict(self)


def as_tensor(image: Any) -> Tensor:
    """Convert a PIL image to uint8 ``[channels, height, width]``, greyscale or RGB. Tensors are returned unchanged."""
    if isinstance(image, Tensor):
        return image
    if image.mode in {"I", "F"}:
        raise DataError(
            f"An image of mode {image.mode} has 32-bit pixels, whose white level is undefined. Convert the image to 8 bits."
        )
    if image.mode.startswith("I;16"):
        wide: Tensor = functional.pil_to_tensor(image.convert("I"))
        return ((wide + 128) // 257).to(torch.uint8)  # white is 65535 = 257 · 255
    grey = image.mode in {"1", "L", "LA"}
    pixels: Tensor = functional.pil_to_tensor(image.convert("L" if grey else "RGB"))  # drops palette and transparency
    return pixels


def with_channels(pixels: Tensor, channels: int) -> Tensor:
    """Convert between greyscale and colour. Greyscale is repeated; colour is reduced to luma (ITU-R BT.601)."""
    current = pixels.shape[-3] if pixels.ndim >= 3 else 0
    if current == channels:
        return pixels
    if {current, channels} != {1, 3}:
        raise ShapeError(
            f"An image of shape {list(pixels.shape)} cannot be converted to {channels} channels. Only greyscale "
            "[1, height, width] and colour [3, height, width] can be converted into each other."
        )
    if current == 1:
        return pixels.repeat_interleave(3, dim=-3)
    grey: Tensor = functional.rgb_to_grayscale(pixels)
    return grey
