"""The sources of `create_model`: one module per source, chosen by the prefix of the name."""

from __future__ import annotations

from typing import Any, Final, Protocol

from torch import nn

from lightning_bayes.zoo.sources import registered, timm_models, torchvision_models
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights


class ModelSource(Protocol):
    """The functions of a source. Names come without the source's prefix."""

    def names(self, pattern: str) -> list[str]:
        """The names that match a shell pattern, in alphabetical order."""

    def build(self, name: str, num_classes: int, in_channels: int, arguments: dict[str, Any]) -> nn.Module:
        """The model with random weights."""

    def published(
        self, name: str, weights: str | None, in_channels: int, arguments: dict[str, Any]
    ) -> PublishedWeights:
        """Published weights by name; None takes the default ones."""

    def transform(self, name: str, model: nn.Module) -> ImageTransform | None:
        """The input transform of the model's published weights; None if it has none."""


_BY_PREFIX: Final[dict[str, ModelSource]] = {"timm/": timm_models, "torchvision/": torchvision_models}


def source_of(name: str) -> tuple[ModelSource, str]:
    """The source of a model, and the name without its prefix."""
    prefix, slash, rest = name.partition("/")
    source = _BY_PREFIX.get(prefix + slash)
    return (registered, name) if source is None else (source, rest)
