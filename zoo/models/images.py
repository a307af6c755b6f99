"""Argument and input checks shared by the image models."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_bayes.errors import HyperparameterError, ShapeError


def require_counts(model: str, num_classes: int, in_channels: int) -> None:
    """Require at least one class and one channel; raises HyperparameterError otherwise."""
    if num_classes < 1 or in_channels < 1:
        raise HyperparameterError(
            f"{model} got num_classes={num_classes} and in_channels={in_channels}; both must be at least 1."
        )


def require_size(model: str, image_size: int, sizes: Iterable[int]) -> None:
    """Require a supported image size in pixels; raises HyperparameterError otherwise."""
    supported = list(sizes)
    if image_size not in supported:
        raise HyperparameterError(
            f"{model} got image_size={image_size}, but supports {', '.join(map(str, supported))}. "
            "Resize the images to one of these sizes."
        )


def require_images(images: Tensor, model: str, in_channels: int, image_size: int | None = None) -> None:
    """Raise ShapeError unless images are ``[batch, in_channels, image_size, image_size]``; None allows any size."""
    size = images.shape[2:] if image_size is None else (image_size, image_size)
    if images.ndim != 4 or images.shape[1] != in_channels or images.shape[2:] != size:
        height_width = "height, width" if image_size is None else f"{image_size}, {image_size}"
        arguments = "in_channels" if image_size is None else "in_channels and image_size"
        raise ShapeError(
            f"{model} was built for images [batch, {in_channels}, {height_width}], but got {list(images.shape)}. "
            f"Set {arguments} to match the data."
        )
