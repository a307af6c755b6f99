"""The models of the registry, with the weights that torchvision or timm publish for the same architecture."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any, Final, final

from torch import nn

from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo.registry import MODELS, ModelEntry
from lightning_bayes.zoo.sources.timm_models import timm_weights
from lightning_bayes.zoo.sources.torchvision_models import torchvision_weights
from lightning_bayes.zoo.transforms import ImageTransform, imagenet_transform
from lightning_bayes.zoo.weights import PublishedWeights

_TIMM: Final = "timm/"


@final
class RegisteredModels:
    """Implements `ModelSource` for `register_model`."""

    def names(self, pattern: str) -> list[str]:
        """See `ModelSource.names`."""
        return sorted(name for name in MODELS if fnmatch(name, pattern))

    def build(self, name: str, num_classes: int, in_channels: int, arguments: dict[str, Any]) -> nn.Module:
        """See `ModelSource.build`."""
        entry = self._entry(name)
        unknown = [argument for argument in arguments if argument not in entry.options]
        if unknown:
            raise HyperparameterError(
                f"{name} takes no argument {', '.join(unknown)}; it takes {', '.join(entry.options)}."
            )
        return entry.builder(num_classes=num_classes, in_channels=in_channels, **{**entry.arguments, **arguments})

    def published(
        self, name: str, weights: str | None, in_channels: int, arguments: dict[str, Any]
    ) -> PublishedWeights:
        """See `ModelSource.published`."""
        entry = self._entry(name)
        if entry.torchvision is None:
            published = sorted(known for known, entry in MODELS.items() if entry.torchvision is not None)
            raise WeightsError(
                f"There are no published weights for {name}, only for {', '.join(published)}. Use one of these, or pass "
                f"the path of a file as pretrained."
            )
        if weights is not None and weights.startswith(_TIMM):
            theirs = timm_weights(weights.removeprefix(_TIMM))
            return theirs._replace(state=entry.from_timm(theirs.state))
        return torchvision_weights(entry.torchvision, weights, also=", and timm/NAME")

    def transform(self, name: str, model: nn.Module) -> ImageTransform | None:
        """See `ModelSource.transform`."""
        return imagenet_transform() if self._entry(name).torchvision is not None else None

    def _entry(self, name: str) -> ModelEntry:
        if name not in MODELS:
            raise HyperparameterError(
                f"There is no model {name!r}; there are {', '.join(self.names('*'))}, and timm/NAME and torchvision/NAME."
            )
        return MODELS[name]
