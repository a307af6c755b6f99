"""What `create_model` asks of a source of models."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights


class ModelSource(Protocol):
    """Models by name, with their published weights. Names come without the source's prefix."""

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
