"""Input transforms: from an image to the shape, size and scale that a model's weights were trained with.

x = (pixel / 255 - mean) / std        after resizing the shorter side and cropping the centre
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from lightning_bayes.errors import DataError, HyperparameterError, ShapeError

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)  # of ImageNet's training images in [0, 1], red, green and blue
IMAGENET_STD: Final = (0.229, 0.224, 0.225)


@final
@dataclass(frozen=True)
class ImageTransform:
    """Resizes, crops the centre, converts to the number of channels of `mean` and normalises.

    It consists of plain values only, so that a posterior file can hold it.

    Args:
        image_size: Height and width of the result in pixels.
        mean: Per channel, on the scale [0, 1].
        std: Per channel, on the same scale.
        resize: Length of the image's shorter side before the crop; None takes `image_size`.
        interpolation: How to resize: ``"bilinear"``, ``"bicubic"`` or ``"nearest"``.

    Raises:
        HyperparameterError: If the values do not fit together.

    Example:
        >>> import torch
        >>> transform = ImageTransform(image_size=2, mean=(0.5,), std=(0.25,))
        >>> transform(torch.full((1, 4, 6), 255, dtype=torch.uint8))
        tensor([[[2., 2.],
                 [2., 2.]]])
    """

    image_size: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    resize: int | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            HyperparameterError: If they do not fit together.
        """
        modes = [mode.value for mode in InterpolationMode]
        if self.interpolation not in modes:
            raise HyperparameterError(
                f"interpolation={self.interpolation!r} is unknown; use one of {', '.join(modes)}."
            )
        if self.image_size < 1 or (self.resize or self.image_size) < self.image_size:
            raise HyperparameterError(
                f"resize={self.resize} and image_size={self.image_size} do not fit: the image is resized first and "
                "cropped to image_size then, so resize must be at least as large, and both positive."
            )
        if len(self.mean) not in {1, 3} or len(self.std) != len(self.mean) or min(self.std) <= 0:
            raise HyperparameterError(
                f"mean={self.mean} and std={self.std} must have one entry for grey or three for colour, and each std must "
                "be positive."
            )

    def __call__(self, image: Any) -> Tensor:
        """The model's input.

        Args:
            image: A PIL image, or a tensor ``[..., channels, height, width]``: bytes, or floats in [0, 1].

        Returns:
            Floats ``[..., len(mean), image_size, image_size]``.
        """
        return self.normalize(self.crop(image))

    def crop(self, image: Any) -> Tensor:
        """The part of the image that the model sees, before normalisation.

        Args:
            image: As for the call.

        Returns:
            ``[..., len(mean), image_size, image_size]``, of the image's type.
        """
        pixels = with_channels(as_tensor(image), len(self.mean))
        if pixels.shape[-2:] == (self.image_size, self.image_size) and self.resize in {None, self.image_size}:
            return pixels
        mode = InterpolationMode(self.interpolation)
        resized = functional.resize(pixels, [self.resize or self.image_size], interpolation=mode, antialias=True)
        cropped: Tensor = functional.center_crop(resized, [self.image_size, self.image_size])
        return cropped

    def normalize(self, pixels: Tensor) -> Tensor:
        """(x - mean) / std per channel.

        Args:
            pixels: ``[..., len(mean), height, width]``, bytes, or floats in [0, 1].

        Returns:
            Floats of the same shape.
        """
        scaled = pixels if pixels.is_floating_point() else pixels / 255
        mean, std = scaled.new_tensor(self.mean), scaled.new_tensor(self.std)
        return (scaled - mean[:, None, None]) / std[:, None, None]

    def to_dict(self) -> dict[str, Any]:
        """The arguments, as plain values; ``ImageTransform(**values)`` is the inverse."""
        return asdict(self)


def as_tensor(image: Any) -> Tensor:
    """A PIL image as bytes ``[channels, height, width]``, colour unless it is grey; a tensor stays as it is.

    Args:
        image: The image; 16-bit grey is rounded to 8 bits.

    Returns:
        The tensor.

    Raises:
        DataError: If the pixels are 32-bit numbers, which have no stated range.
    """
    if isinstance(image, Tensor):
        return image
    if image.mode in {"I", "F"}:
        raise DataError(
            f"The pixels of mode {image.mode} are 32-bit numbers, and nothing says which of them is white. Convert the "
            "image to 8 bits."
        )
    if image.mode.startswith("I;16"):
        deep: Tensor = functional.pil_to_tensor(image.convert("I"))
        return ((deep + 128) // 257).to(torch.uint8)  # 257 · 255 is white
    grey = image.mode in {"1", "L", "LA"}
    pixels: Tensor = functional.pil_to_tensor(image.convert("L" if grey else "RGB"))  # without palette and transparency
    return pixels


def with_channels(pixels: Tensor, channels: int) -> Tensor:
    """The image in another number of channels: grey is repeated, colour becomes its luma (ITU-R BT.601).

    Args:
        pixels: ``[..., 1 or 3, height, width]``.
        channels: 1 or 3.

    Returns:
        ``[..., channels, height, width]``.

    Raises:
        ShapeError: If the image has neither one nor three channels, or another number is asked for.

    Example:
        >>> import torch
        >>> with_channels(torch.zeros(1, 8, 8), 3).shape
        torch.Size([3, 8, 8])
    """
    has = pixels.shape[-3] if pixels.ndim >= 3 else 0
    if has == channels:
        return pixels
    if {has, channels} != {1, 3}:
        raise ShapeError(
            f"An image of shape {list(pixels.shape)} cannot be brought to {channels} channels; only grey "
            "[1, height, width] and colour [3, height, width] can be turned into each other."
        )
    if has == 1:
        return pixels.repeat_interleave(3, dim=-3)
    grey: Tensor = functional.rgb_to_grayscale(pixels)
    return grey


def imagenet_transform(image_size: int = 224, resize: int = 256) -> ImageTransform:
    """The transform of torchvision's classifiers trained on ImageNet.

    Args:
        image_size: Height and width after the crop.
        resize: Length of the shorter side before.

    Returns:
        The transform.
    """
    return ImageTransform(image_size, IMAGENET_MEAN, IMAGENET_STD, resize)
