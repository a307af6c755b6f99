"""torchvision classifiers, as ``torchvision/NAME``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision import models

from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights, fetch, read_weights


def names(pattern: str) -> list[str]:
    """See `ModelSource.names`."""
    return sorted(models.list_models(module=models, include=pattern))


def build(name: str, num_classes: int, in_channels: int, arguments: dict[str, Any]) -> nn.Module:
    """See `ModelSource.build`."""
    if name not in models.list_models(module=models):
        raise HyperparameterError(
            f"torchvision has no classifier {name!r}. zoo.list_models('torchvision/*') lists all classifiers."
        )
    if in_channels != 3:
        raise HyperparameterError(
            f"torchvision/{name} requires in_channels=3, not {in_channels}. Use a timm model for other numbers of channels."
        )
    model: nn.Module = models.get_model(name, num_classes=num_classes, **arguments)
    return model


def published(name: str, weights: str | None, in_channels: int, arguments: dict[str, Any]) -> PublishedWeights:
    """See `ModelSource.published`."""
    choices = models.get_model_weights(name).__members__
    weights = weights or "DEFAULT"
    if weights not in choices:
        raise WeightsError(
            f"{weights!r} is neither a file nor one of torchvision's weights for {name}: {', '.join(choices)}. "
            "Use timm/NAME for timm weights."
        )
    entry = choices[weights].value
    path = fetch(entry.url)
    return PublishedWeights(read_weights(path), transform_of(entry.transforms()), str(path))


def transform(name: str, model: nn.Module) -> ImageTransform | None:
    """See `ModelSource.transform`."""
    return transform_of(models.get_model_weights(name)["DEFAULT"].transforms())


def transform_of(preset: Any) -> ImageTransform:
    """Convert torchvision's ``ImageClassification`` preset to an `ImageTransform`."""
    return ImageTransform(
        image_size=preset.crop_size[0],
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        resize=preset.resize_size[0],
        interpolation=preset.interpolation.value,
    )
