"""Model sources of `create_model`: one module per source, chosen by the prefix of the name."""

from __future__ import annotations

from typing import Any, Final, Protocol

from torch import nn

from lightning_bayes.zoo.sources import registered, timm_models, torchvision_models
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights


class ModelSource(Protocol):
    """The interface of a source. Names do not include the source's prefix."""

    def names(self, pattern: str) -> list[str]:
        """Names that match a shell pattern, in alphabetical order."""

    def build(self, name: str, num_classes: int, in_channels: int, arguments: dict[str, Any]) -> nn.Module:
        """Build the model with random weights."""

    def published(
        self, name: str, weights: str | None, in_channels: int, arguments: dict[str, Any]
    ) -> PublishedWeights:
        """Load published weights by name; None loads the default weights."""

    def transform(self, name: str, model: nn.Module) -> ImageTransform | None:
        """The input transform of the model's published weights; None if there are none."""


_BY_PREFIX: Final[dict[str, ModelSource]] = {"timm/": timm_models, "torchvision/": torchvision_models}


def source_of(name: str) -> tuple[ModelSource, str]:
    """The source of a model, and the name without its prefix."""
    prefix, slash, rest = name.partition("/")
    source = _BY_PREFIX.get(prefix + slash)
    return (registered, name) if source is None else (source, rest)
