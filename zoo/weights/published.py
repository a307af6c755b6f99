"""The weights that torchvision and timm publish, with the input transform that belongs to them.

AlexNet (Krizhevsky 2014, https://arxiv.org/abs/1404.5997), VGG16 (Simonyan & Zisserman 2015,
https://arxiv.org/abs/1409.1556) and ResNet-18 (He et al. 2016, https://arxiv.org/abs/1512.03385), trained on ImageNet. Our
ImageNet forms name their parameters as torchvision does; timm's VGG16 names and shapes its linear layers in its own way.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models import get_model_weights

from lightning_bayes.errors import HyperparameterError, WeightsError
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights.reading import read_weights

_TORCHVISION: Final = {  # our name: torchvision's
    "alexnet_imagenet": "alexnet",
    "resnet18_imagenet": "resnet18",
    "vgg16_imagenet": "vgg16",
    "vgg16_bn_imagenet": "vgg16_bn",
}
_TIMM_LAYERS: Final = {  # timm's VGG has two convolutions where torchvision's has linear layers
    "pre_logits.fc1": "classifier.0",
    "pre_logits.fc2": "classifier.3",
    "head.fc": "classifier.6",
}


class PublishedWeights(NamedTuple):
    """What was published together.

    Attributes:
        state: Tensors by name.
        transform: What images go through before the model; None if not known.
        source: Where the weights come from, for messages.
    """

    state: dict[str, Tensor]
    transform: ImageTransform | None
    source: str


def published_weights(name: str, weights: bool | str) -> PublishedWeights:
    """The published weights of one of our models.

    Args:
        name: Our name of the model, one of an ImageNet form.
        weights: True for torchvision's default ones, the name of others (``"IMAGENET1K_V1"``), or
            ``"timm/resnet18.a1_in1k"`` for those of timm.

    Returns:
        The weights.

    Raises:
        WeightsError: If there are none of that name, or they can be neither found nor fetched.
    """
    if name not in _TORCHVISION:
        raise WeightsError(
            f"There are no published weights for {name}, only for {', '.join(_TORCHVISION)}. Use one of these, or pass "
            f"the path of a file as pretrained."
        )
    if isinstance(weights, str) and weights.startswith("timm/"):
        theirs = timm_weights(weights.removeprefix("timm/"))
        return theirs._replace(state=from_timm(theirs.state))
    choices = get_model_weights(_TORCHVISION[name]).__members__
    wanted = "DEFAULT" if weights is True else str(weights)
    if wanted not in choices:
        raise WeightsError(
            f"{wanted!r} is neither a file nor the name of weights for {name}, which are {', '.join(choices)}, and "
            "timm/NAME."
        )
    entry = choices[wanted].value
    path = fetch(entry.url)
    return PublishedWeights(read_weights(path), torchvision_transform(entry.transforms()), str(path))


def fetch(url: str) -> Path:
    """The file of a URL in the cache of torch.hub, downloaded if it is not there.

    Args:
        url: Where it is published; a hash in its name (``-f37072fd.pth``) is checked after the download.

    Returns:
        The file.

    Raises:
        WeightsError: If it is not there and cannot be downloaded; says which file can be put where.
    """
    name = os.path.basename(url)
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.is_file():
        return path
    digest = re.search(r"-([0-9a-f]{8,})\.", name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digest and digest[1])
    except (OSError, RuntimeError) as error:  # no network, no place to write, or another hash
        raise WeightsError(
            f"{url} could not be fetched ({error}). Without network, fetch it elsewhere and put it in place as {path}, or "
            f"pass the path of the file: pretrained='.../{name}'."
        ) from error
    return path


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


def timm_model(name: str, **arguments: Any) -> nn.Module:
    """A model of timm with random weights.

    Args:
        name: timm's name, with or without the tag of weights (``resnet18.a1_in1k``), which tells the transform.
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
        The weights under timm's names, the head for the classes that they were trained on.

    Raises:
        WeightsError: If they can be neither found nor fetched; says which file to fetch elsewhere.
    """
    try:
        model = timm_model(name, pretrained=True, **arguments)
    except (OSError, RuntimeError) as error:  # no network, or no weights
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise WeightsError(
            f"timm's weights of {name} could not be loaded ({reason}). Without network, fetch {_timm_url(name)} elsewhere "
            "and pass the path of the file as pretrained."
        ) from error
    return PublishedWeights(model.state_dict(), timm_transform(model), f"timm/{name}")


def _timm_url(name: str) -> str:
    import timm

    config = timm.get_pretrained_cfg(name)
    repository = config.hf_hub_id if config is not None else None
    return f"https://huggingface.co/{repository or f'timm/{name}'}/resolve/main/model.safetensors"


def timm_transform(model: nn.Module) -> ImageTransform:
    """The transform that belongs to the weights of a timm model.

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


def from_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of timm's AlexNet-like, VGG and ResNet models under torchvision's names.

    Args:
        state: timm's state dict.

    Returns:
        The same tensors; the two hidden layers of VGG, convolutions in timm, flattened to linear ones.

    Example:
        >>> {name: list(w.shape) for name, w in from_timm({"pre_logits.fc1.weight": torch.zeros(5, 2, 7, 7)}).items()}
        {'classifier.0.weight': [5, 98]}
    """
    renamed = {}
    for name, value in state.items():
        layer, _, parameter = name.rpartition(".")
        flat = value.flatten(1) if layer.startswith("pre_logits.") and value.ndim == 4 else value
        renamed[f"{_TIMM_LAYERS.get(layer, layer)}.{parameter}"] = flat
    return renamed
