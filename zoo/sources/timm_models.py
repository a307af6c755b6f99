"""The models of timm, as ``timm/NAME`` or, with the tag of their weights, ``timm/NAME.TAG``."""

from __future__ import annotations

import math
import re
from typing import Any, Final, final

from torch import nn

from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights

_PREFIX: Final = "timm/"


@final
class TimmModels:
    """Implements `ModelSource` for timm."""

    def names(self, pattern: str) -> list[str]:
        """See `ModelSource.names`."""
        import timm  # lazy: it takes seconds

        return timm.list_models(pattern)

    def build(self, name: str, num_classes: int, in_channels: int, arguments: dict[str, Any]) -> nn.Module:
        """See `ModelSource.build`."""
        return timm_model(name, num_classes=num_classes, in_chans=in_channels, **arguments)

    def published(
        self, name: str, weights: str | None, in_channels: int, arguments: dict[str, Any]
    ) -> PublishedWeights:
        """See `ModelSource.published`; the weights are a tag, or all of ``timm/NAME.TAG``."""
        if weights is None:
            tagged = name
        elif weights.startswith(_PREFIX):
            tagged = weights.removeprefix(_PREFIX)
        else:
            tagged = f"{name.partition('.')[0]}.{weights}"
        return timm_weights(tagged, in_chans=in_channels, **arguments)

    def transform(self, name: str, model: nn.Module) -> ImageTransform | None:
        """See `ModelSource.transform`."""
        return timm_transform(model)


def timm_model(name: str, **arguments: Any) -> nn.Module:
    """A timm model with random weights.

    Args:
        name: timm's name, with or without the tag of weights (``resnet18.a1_in1k``), which decides the transform.
        **arguments: Arguments of ``timm.create_model``.

    Returns:
        The model.

    Raises:
        HyperparameterError: If timm knows no such model, or no such tag of it.
    """
    import timm  # lazy: it takes seconds

    if not timm.is_model(name.partition(".")[0]):
        near = timm.list_models(f"*{re.split('[^a-z]', name)[0]}*")[:10]
        raise HyperparameterError(
            f"timm has no model {name!r}. It has {', '.join(near) or 'none of a similar name'}; zoo.list_models('timm/*') "
            "lists them all."
        )
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # of the tag
        tagged = ", ".join(timm.list_pretrained(f"{name.partition('.')[0]}.*"))
        raise HyperparameterError(f"timm has no weights {name!r}; its weights are {tagged or 'none'}.") from error
    model: nn.Module = timm.create_model(name, **arguments)
    return model


def timm_weights(name: str, **arguments: Any) -> PublishedWeights:
    """The weights that timm publishes for one of its models.

    Args:
        name: timm's name, with or without the tag of the weights.
        **arguments: Arguments of ``timm.create_model`` other than the number of classes.

    Returns:
        The weights under timm's names, with the head for the classes that they were trained on.

    Raises:
        WeightsError: If they can be neither found nor fetched; names the file to fetch elsewhere.
    """
    try:
        model = timm_model(name, pretrained=True, **arguments)
    except (OSError, RuntimeError) as error:  # no network, or no weights
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise WeightsError(
            f"timm's weights of {name} could not be loaded ({reason}). Without network, fetch {_url(name)} elsewhere "
            "and pass the path of the file as pretrained."
        ) from error
    return PublishedWeights(model.state_dict(), timm_transform(model), f"{_PREFIX}{name}")


def _url(name: str) -> str:
    import timm

    config = timm.get_pretrained_cfg(name)
    repository = config.hf_hub_id if config is not None else None
    return f"https://huggingface.co/{repository or f'timm/{name}'}/resolve/main/model.safetensors"


def timm_transform(model: nn.Module) -> ImageTransform:
    """The input transform of a timm model's weights.

    Args:
        model: The model.

    Returns:
        The transform.
    """
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
