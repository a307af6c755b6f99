"""Checks of arguments and inputs that the image models share."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_bayes.errors import HyperparameterError, ShapeError


def require_counts(model: str, num_classes: int, in_channels: int) -> None:
    """Require at least one class and one channel.

    Args:
        model: The model's name.
        num_classes: Number of classes.
        in_channels: Channels of the images.

    Raises:
        HyperparameterError: If one is not positive.
    """
    if num_classes < 1 or in_channels < 1:
        raise HyperparameterError(
            f"{model} got num_classes={num_classes} and in_channels={in_channels}; both must be at least 1."
        )


def require_size(model: str, image_size: int, sizes: Iterable[int]) -> None:
    """Require a supported image size.

    Args:
        model: The model's name.
        image_size: Height and width in pixels.
        sizes: The supported ones.

    Raises:
        HyperparameterError: If it is another one.
    """
    allowed = list(sizes)
    if image_size not in allowed:
        raise HyperparameterError(
            f"{model} got image_size={image_size}, but is laid out for {', '.join(map(str, allowed))}. "
            "Resize the images to one of these."
        )


def require_images(images: Tensor, model: str, in_channels: int, image_size: int | None = None) -> None:
    """Require images of the shape that a model was built for.

    Args:
        images: The model's input.
        model: The model's name.
        in_channels: Channels it was built for.
        image_size: Height and width in pixels it was built for; None allows any.

    Raises:
        ShapeError: If the images have another shape.
    """
    size = images.shape[2:] if image_size is None else (image_size, image_size)
    if images.ndim != 4 or images.shape[1] != in_channels or images.shape[2:] != size:
        height_width = "height, width" if image_size is None else f"{image_size}, {image_size}"
        raise ShapeError(
            f"{model} was built for images [batch, {in_channels}, {height_width}] but got {list(images.shape)}. "
            f"Set in_channels{'' if image_size is None else ' and image_size'} to those of the data."
        )
