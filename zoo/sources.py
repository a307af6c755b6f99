"""Where a model comes from by its name: the registry, timm as ``timm/NAME``, or torchvision as ``torchvision/NAME``."""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from fnmatch import fnmatch
from typing import Any, Final, final

from torch import nn
from torchvision import models
from typing_extensions import override

from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo.registry import MODELS, ModelEntry
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights, fetch, read_weights

_TIMM: Final = "timm/"


class ModelSource(ABC):
    """Models and their published weights. Names do not include the source's prefix."""

    @abstractmethod
    def names(self, pattern: str) -> list[str]:
        """Names that match a shell pattern, in alphabetical order."""

    @abstractmethod
    def build(self, name: str, num_classes: int, in_channels: int, **arguments: Any) -> nn.Module:
        """Build the model with random weights."""

    @abstractmethod
    def published(self, name: str, weights: str | None, in_channels: int, **arguments: Any) -> PublishedWeights:
        """Load published weights by name; None loads the default weights."""

    @abstractmethod
    def transform(self, name: str, model: nn.Module) -> ImageTransform | None:
        """The input transform of the model's published weights; None if there are none."""


@final
class _Torchvision(ModelSource):
    """torchvision's classifiers."""

    @override
    def names(self, pattern: str) -> list[str]:
        return sorted(models.list_models(module=models, include=pattern))

    @override
    def build(self, name: str, num_classes: int, in_channels: int, **arguments: Any) -> nn.Module:
        if name not in models.list_models(module=models):
            raise HyperparameterError(
                f"torchvision has no classifier {name!r}. zoo.list_models('torchvision/*') lists all classifiers."
            )
        if in_channels != 3:
            raise HyperparameterError(
                f"torchvision/{name} requires in_channels=3, not {in_channels}. Use a timm model for other numbers of "
                "channels."
            )
        model: nn.Module = models.get_model(name, num_classes=num_classes, **arguments)
        return model

    @override
    def published(self, name: str, weights: str | None, in_channels: int, **arguments: Any) -> PublishedWeights:
        choices = models.get_model_weights(name).__members__
        if (weights or "DEFAULT") not in choices:
            raise WeightsError(
                f"{weights!r} is neither a file nor one of torchvision's weights for {name}: {', '.join(choices)}. "
                "Use timm/NAME for timm weights."
            )
        entry = choices[weights or "DEFAULT"].value
        path = fetch(entry.url)
        return PublishedWeights(read_weights(path), transform_of(entry.transforms()), str(path))

    @override
    def transform(self, name: str, model: nn.Module) -> ImageTransform | None:
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


@final
class _Timm(ModelSource):
    """timm's models; a name may end in the tag of weights, as ``resnet18.a1_in1k``, whose transform it then has."""

    @override
    def names(self, pattern: str) -> list[str]:
        import timm  # lazy, because the import takes seconds

        return timm.list_models(pattern)

    @override
    def build(self, name: str, num_classes: int, in_channels: int, **arguments: Any) -> nn.Module:
        return _timm_model(name, num_classes=num_classes, in_chans=in_channels, **arguments)

    @override
    def published(self, name: str, weights: str | None, in_channels: int, **arguments: Any) -> PublishedWeights:
        full_name = weights is None or weights.startswith(_TIMM)
        tagged = (weights or name).removeprefix(_TIMM) if full_name else f"{name.partition('.')[0]}.{weights}"
        try:
            model = _timm_model(tagged, pretrained=True, in_chans=in_channels, **arguments)
        except (OSError, RuntimeError) as error:  # no network, or no weights
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise WeightsError(
                f"timm's weights {tagged} could not be loaded ({reason}). Without network access, download "
                f"{_timm_url(tagged)} elsewhere and pass the path of the file as pretrained."
            ) from error
        return PublishedWeights(model.state_dict(), self.transform(tagged, model), f"{_TIMM}{tagged}")

    @override
    def transform(self, name: str, model: nn.Module) -> ImageTransform:
        from timm.data.config import resolve_model_data_config

        config = resolve_model_data_config(model)  # type: ignore[no-untyped-call]
        size, mean, std = int(config["input_size"][-1]), tuple(config["mean"]), tuple(config["std"])
        return ImageTransform(size, mean, std, math.floor(size / config["crop_pct"]), config["interpolation"])


def _timm_model(name: str, **arguments: Any) -> nn.Module:
    import timm

    if not timm.is_model(name.partition(".")[0]):
        similar = timm.list_models(f"*{re.split('[^a-z]', name)[0]}*")[:10]
        raise HyperparameterError(
            f"timm has no model {name!r}. Similar names: {', '.join(similar) or 'none'}. zoo.list_models('timm/*') lists "
            "all models."
        )
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # unknown tag
        tagged = ", ".join(timm.list_pretrained(f"{name.partition('.')[0]}.*"))
        raise HyperparameterError(f"timm has no weights {name!r}. Available weights: {tagged or 'none'}.") from error
    model: nn.Module = timm.create_model(name, **arguments)
    return model


def _timm_url(name: str) -> str:
    import timm

    config = timm.get_pretrained_cfg(name)
    repository = config.hf_hub_id if config is not None else None
    return f"https://huggingface.co/{repository or f'{_TIMM}{name}'}/resolve/main/model.safetensors"


@final
class _Registered(ModelSource):
    """Registered models, with the weights that torchvision or timm publish for the same architecture."""

    @override
    def names(self, pattern: str) -> list[str]:
        return sorted(name for name in MODELS if fnmatch(name, pattern))

    @override
    def build(self, name: str, num_classes: int, in_channels: int, **arguments: Any) -> nn.Module:
        entry = _registered(name)
        unknown = [argument for argument in arguments if argument not in entry.options]
        if unknown:
            raise HyperparameterError(
                f"{name} does not accept {', '.join(unknown)}. Its arguments are {', '.join(entry.options)}."
            )
        return entry.builder(num_classes=num_classes, in_channels=in_channels, **{**entry.arguments, **arguments})

    @override
    def published(self, name: str, weights: str | None, in_channels: int, **arguments: Any) -> PublishedWeights:
        entry = _registered(name)
        if entry.torchvision is None:
            others = sorted(other for other, model in MODELS.items() if model.torchvision is not None)
            raise WeightsError(
                f"There are no published weights for {name}, only for {', '.join(others)}. Use one of these, or pass the "
                "path of a weights file as pretrained."
            )
        if weights is not None and weights.startswith(_TIMM):
            found = _TIMM_MODELS.published("", weights, 3)
            return found._replace(state=entry.from_timm(found.state))
        return _TORCHVISION.published(entry.torchvision, weights, in_channels, **arguments)

    @override
    def transform(self, name: str, model: nn.Module) -> ImageTransform | None:
        same = _registered(name).torchvision
        return None if same is None else _TORCHVISION.transform(same, model)


def known_names() -> str:
    """All names that `create_model` accepts, for error messages."""
    return f"{', '.join(sorted(MODELS))}, timm/NAME and torchvision/NAME"


def _registered(name: str) -> ModelEntry:
    if name not in MODELS:
        close = difflib.get_close_matches(name, MODELS, 3, 0.5)
        question = f" Did you mean {' or '.join(close)}?" if close else ""
        raise HyperparameterError(f"There is no model {name!r}.{question} Available models: {known_names()}.")
    return MODELS[name]


_REGISTERED, _TIMM_MODELS, _TORCHVISION = _Registered(), _Timm(), _Torchvision()


def source_of(name: str) -> tuple[ModelSource, str]:
    """The source of a model, and the name without its prefix."""
    if name.startswith(_TIMM):
        return _TIMM_MODELS, name.removeprefix(_TIMM)
    is_torchvisions = name.startswith("torchvision/")
    return (_TORCHVISION, name.removeprefix("torchvision/")) if is_torchvisions else (_REGISTERED, name)
