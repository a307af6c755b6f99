"""timm models, as ``timm/NAME``, or ``timm/NAME.TAG`` with the tag of their weights."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from torch import nn

from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights

PREFIX: Final = "timm/"


def names(pattern: str) -> list[str]:
    """See `ModelSource.names`."""
    import timm  # lazy, because the import takes seconds

    return timm.list_models(pattern)


def build(name: str, num_classes: int, in_channels: int, arguments: dict[str, Any]) -> nn.Module:
    """See `ModelSource.build`; the weights' tag determines the transform."""
    return _create(name, num_classes=num_classes, in_chans=in_channels, **arguments)


def published(name: str, weights: str | None, in_channels: int, arguments: dict[str, Any]) -> PublishedWeights:
    """See `ModelSource.published`; `weights` is a tag of the model, or ``timm/NAME.TAG``."""
    tagged = _tagged(name, weights)
    try:
        model = _create(tagged, pretrained=True, in_chans=in_channels, **arguments)
    except (OSError, RuntimeError) as error:  # no network, or no weights
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise WeightsError(
            f"timm's weights {tagged} could not be loaded ({reason}). Without network access, download {_url(tagged)} "
            "elsewhere and pass the path of the file as pretrained."
        ) from error
    return PublishedWeights(model.state_dict(), transform(tagged, model), f"{PREFIX}{tagged}")


def transform(name: str, model: nn.Module) -> ImageTransform:
    """See `ModelSource.transform`."""
    from timm.data.config import resolve_model_data_config

    config = resolve_model_data_config(model)  # type: ignore[no-untyped-call]
    image_size = int(config["input_size"][-1])
    return ImageTransform(
        image_size=image_size,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        resize=math.floor(image_size / config["crop_pct"]),
        interpolation=config["interpolation"],
    )


def _create(name: str, **arguments: Any) -> nn.Module:
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


def _tagged(name: str, weights: str | None) -> str:
    if weights is None:
        return name
    if weights.startswith(PREFIX):
        return weights.removeprefix(PREFIX)
    return f"{name.partition('.')[0]}.{weights}"


def _url(name: str) -> str:
    import timm

    config = timm.get_pretrained_cfg(name)
    repository = config.hf_hub_id if config is not None else None
    return f"https://huggingface.co/{repository or f'{PREFIX}{name}'}/resolve/main/model.safetensors"
