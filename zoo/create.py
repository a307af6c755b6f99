"""Models by name: those that are registered, any of timm as ``timm/NAME``, any of torchvision as ``torchvision/NAME``.

Names that end in ``_imagenet`` are architectures for 224 × 224 images, which load torchvision's published weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import nn

import lightning_bayes.zoo.models  # noqa: F401  (its files register themselves)
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.zoo.sources import ModelSource, source_of
from lightning_bayes.zoo.sources.registered import known_names
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import PublishedWeights, load_weights, read_weights, unwrapped

_FILES: Final = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors")


class Architecture(NamedTuple):
    """The arguments of a `create_model` call without its weights: enough to build the model again.

    Attributes:
        name: The model's name.
        arguments: All others, ``num_classes`` and ``in_channels`` included.
    """

    name: str
    arguments: dict[str, Any]


def list_models(pattern: str = "*") -> list[str]:
    """Names that `create_model` takes.

    Args:
        pattern: Shell pattern, such as ``"*imagenet"``, ``"timm/resnet*"`` or ``"torchvision/*"``.

    Returns:
        The names, in alphabetical order. Those of timm and torchvision are listed only if the pattern has their prefix.

    Example:
        >>> list_models("resnet*")
        ['resnet18', 'resnet18_imagenet']
    """
    source, rest = source_of(pattern)
    prefix = pattern.removesuffix(rest)
    return [f"{prefix}{name}" for name in source.names(rest)]


def create_model(
    name: str,
    num_classes: int | None = 10,
    in_channels: int = 3,
    pretrained: bool | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    replace_head: bool | None = None,
    **arguments: Any,
) -> nn.Module:
    """Build a model by name, with random or with pretrained weights.

    Pretrained weights of another number of classes are loaded without their last layer, and a message says so. Nothing else
    may differ: a `WeightsError` lists every name that is missing, unexpected or of another shape. `input_transform` of the
    model is the transform of the weights.

    Args:
        name: One of `list_models`, ``timm/NAME`` or ``torchvision/NAME``.
        num_classes: Number of classes C; the output is ``[batch, C]``. None is for configs of the command line, which puts
            in the number that the data have.
        in_channels: Channels of the images.
        pretrained: True for the weights that torchvision or timm publish; the name of published weights
            (``"IMAGENET1K_V1"``, ``"timm/resnet18.a1_in1k"``, for a timm model also the tag alone); the path of a file with
            a state dict; a state dict; or None for random weights.
        replace_head: Whether the last layer starts from random values. None: only if the number of classes differs.
        **arguments: Further arguments of the model's class.

    Returns:
        The model, an ordinary module.

    Raises:
        HyperparameterError: If `num_classes` is None.

    Example:
        >>> model = create_model("lenet5", num_classes=3, in_channels=1, image_size=28)
        >>> type(model).__name__, architecture(model).name
        ('LeNet5', 'lenet5')
    """
    if num_classes is None:
        raise HyperparameterError(f"create_model({name!r}) got num_classes=None. Pass the number of classes.")
    source, short = source_of(name)
    model = source.build(short, num_classes, in_channels, arguments)
    transform = None
    if pretrained is not None and pretrained is not False:
        if pretrained is True or _names_published_weights(pretrained):
            weights = source.published(short, None if pretrained is True else str(pretrained), in_channels, arguments)
        else:
            weights = _given_weights(pretrained, source, short, model)
        transform = weights.transform
        load_weights(model, weights.state, weights.source, replace_head)
    called = {"num_classes": num_classes, "in_channels": in_channels, **arguments}
    vars(model).update(zoo_architecture=Architecture(name, called), zoo_transform=transform)
    return model


def architecture(model: nn.Module) -> Architecture:
    """The arguments that `create_model` was called with.

    Args:
        model: A model that it built.

    Returns:
        Name and arguments.

    Raises:
        HyperparameterError: If something else built the model.
    """
    found = known_architecture(model)
    if found is None:
        raise HyperparameterError(
            f"This {type(model).__name__} does not know how it was built. Build it with zoo.create_model(name, ...), where "
            f"name is one of {known_names()}."
        )
    return found


def known_architecture(model: nn.Module) -> Architecture | None:
    """The arguments that `create_model` was called with, or None if something else built the model."""
    found = vars(model).get("zoo_architecture")
    return found if isinstance(found, Architecture) else None


def input_transform(model: nn.Module) -> ImageTransform | None:
    """The input transform of a model's weights.

    Args:
        model: A model that `create_model` built.

    Returns:
        That of the image data module that the model was last fitted to; else that of its pretrained weights; None if
        neither is known.
    """
    found = vars(model).get("zoo_transform")
    return found if isinstance(found, ImageTransform) else None


def class_names(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's classes.

    Args:
        model: A model that `create_model` built.

    Returns:
        Those of the data module that the model was last fitted to; empty if not known.
    """
    return tuple(vars(model).get("zoo_class_names", ()))


def _given_weights(pretrained: Any, source: ModelSource, name: str, model: nn.Module) -> PublishedWeights:
    """A state dict, or the file that holds one."""
    if isinstance(pretrained, Mapping):
        return PublishedWeights(unwrapped(pretrained), source.transform(name, model), "The state dict")
    return PublishedWeights(read_weights(pretrained), source.transform(name, model), os.fspath(pretrained))


def _names_published_weights(pretrained: Any) -> bool:
    if not isinstance(pretrained, str) or pretrained.endswith(_FILES) or Path(pretrained).is_file():
        return False
    return pretrained.startswith("timm/") or os.sep not in pretrained
