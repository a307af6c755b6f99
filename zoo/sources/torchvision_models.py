"""The classifiers of torchvision, as ``torchvision/NAME``."""

from __future__ import annotations

from typing import Any, final

from torch import nn
from torchvision import models

from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights, fetch, read_weights


@final
class TorchvisionModels:
    """Implements `ModelSource` for torchvision."""

    def names(self, pattern: str) -> list[str]:
        """See `ModelSource.names`."""
        return sorted(models.list_models(module=models, include=pattern))

    def build(self, name: str, num_classes: int, in_channels: int, arguments: dict[str, Any]) -> nn.Module:
        """See `ModelSource.build`."""
        if name not in models.list_models(module=models):
            raise HyperparameterError(
                f"torchvision has no classifier {name!r}; zoo.list_models('torchvision/*') lists those it has."
            )
        if in_channels != 3:
            raise HyperparameterError(
                f"torchvision/{name} takes images with 3 channels, not in_channels={in_channels}. A timm model takes others."
            )
        model: nn.Module = models.get_model(name, num_classes=num_classes, **arguments)
        return model

    def published(
        self, name: str, weights: str | None, in_channels: int, arguments: dict[str, Any]
    ) -> PublishedWeights:
        """See `ModelSource.published`."""
        return torchvision_weights(name, weights)

    def transform(self, name: str, model: nn.Module) -> ImageTransform | None:
        """See `ModelSource.transform`."""
        return torchvision_transform(models.get_model_weights(name)["DEFAULT"].transforms())


def torchvision_weights(name: str, weights: str | None, also: str = "") -> PublishedWeights:
    """The weights that torchvision publishes for one of its models.

    Args:
        name: torchvision's name of the model.
        weights: Name of the weights (``"IMAGENET1K_V1"``); None takes the default ones.
        also: Other weights that the model takes, for error messages.

    Returns:
        The weights.

    Raises:
        WeightsError: If there are none of that name, or they can be neither found nor fetched.
    """
    choices = models.get_model_weights(name).__members__
    wanted = weights or "DEFAULT"
    if wanted not in choices:
        raise WeightsError(
            f"{wanted!r} is neither a file nor the name of weights for torchvision's {name}, which are "
            f"{', '.join(choices)}{also}."
        )
    entry = choices[wanted].value
    path = fetch(entry.url)
    return PublishedWeights(read_weights(path), torchvision_transform(entry.transforms()), str(path))


def torchvision_transform(preset: Any) -> ImageTransform:
    """Torchvision's preset of a classifier as a transform.

    Args:
        preset: An ``ImageClassification`` preset of torchvision.

    Returns:
        The transform.
    """
    return ImageTransform(
        image_size=preset.crop_size[0],
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        resize=preset.resize_size[0],
        interpolation=preset.interpolation.value,
    )
