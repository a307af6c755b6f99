"""Registered models, with the weights that torchvision or timm publish for the same architecture."""

from __future__ import annotations

import difflib
from fnmatch import fnmatch
from typing import Any

from torch import nn

from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo.registry import MODELS, ModelEntry
from lightning_bayes.zoo.sources import timm_models, torchvision_models
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights


def names(pattern: str) -> list[str]:
    """See `ModelSource.names`."""
    return sorted(name for name in MODELS if fnmatch(name, pattern))


def known_names() -> str:
    """All names that `create_model` accepts, for error messages."""
    return f"{', '.join(sorted(MODELS))}, timm/NAME and torchvision/NAME"


def build(name: str, num_classes: int, in_channels: int, arguments: dict[str, Any]) -> nn.Module:
    """See `ModelSource.build`."""
    entry = _entry(name)
    unknown = [argument for argument in arguments if argument not in entry.options]
    if unknown:
        raise HyperparameterError(
            f"{name} does not accept {', '.join(unknown)}. Its arguments are {', '.join(entry.options)}."
        )
    return entry.builder(num_classes=num_classes, in_channels=in_channels, **{**entry.arguments, **arguments})


def published(name: str, weights: str | None, in_channels: int, arguments: dict[str, Any]) -> PublishedWeights:
    """See `ModelSource.published`."""
    entry = _entry(name)
    if entry.torchvision is None:
        others = sorted(other for other, model in MODELS.items() if model.torchvision is not None)
        raise WeightsError(
            f"There are no published weights for {name}, only for {', '.join(others)}. Use one of these, or pass the path "
            "of a weights file as pretrained."
        )
    if weights is not None and weights.startswith(timm_models.PREFIX):
        timm_weights = timm_models.published("", weights, 3, {})
        return timm_weights._replace(state=entry.from_timm(timm_weights.state))
    return torchvision_models.published(entry.torchvision, weights, in_channels, arguments)


def transform(name: str, model: nn.Module) -> ImageTransform | None:
    """See `ModelSource.transform`."""
    return ImageTransform(224, resize=256) if _entry(name).torchvision is not None else None


def _entry(name: str) -> ModelEntry:
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, 3, 0.5)
        question = f" Did you mean {' or '.join(close)}?" if close else ""
        raise HyperparameterError(f"There is no model {name!r}.{question} Available models: {known_names()}.")
    return MODELS[name]
