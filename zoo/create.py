"""Models by name: those of this package, and any of timm as ``timm/NAME``.

The names that end in ``_imagenet`` are the forms for 224 × 224 images that torchvision's published weights fit; the others
are those of the experiments on small images.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from torch import nn

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.zoo.models import MLP, VGG16, AlexNet, LeNet5, ResNet18
from lightning_bayes.zoo.transforms import ImageTransform, imagenet_transform
from lightning_bayes.zoo.weights import (
    PublishedWeights,
    load_weights,
    published_weights,
    read_weights,
    timm_model,
    timm_transform,
    timm_weights,
    unwrapped,
)

_TIMM: Final = "timm/"
_FILES: Final = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors")


def _mlp(
    num_classes: int,
    in_channels: int,
    image_size: int = 28,
    hidden: tuple[int, ...] = (50,),
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = "relu",
) -> MLP:
    return MLP(in_channels * image_size**2, num_classes, hidden, activation)


_MODELS: Final[dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]]] = {
    "alexnet": (AlexNet, {}),
    "alexnet_imagenet": (AlexNet, {"image_size": 224}),
    "lenet5": (LeNet5, {}),
    "mlp": (_mlp, {}),
    "resnet18": (ResNet18, {}),
    "resnet18_imagenet": (ResNet18, {"stem": "imagenet"}),
    "vgg16": (VGG16, {}),
    "vgg16_bn": (VGG16, {"norm": "batch"}),
    "vgg16_bn_imagenet": (VGG16, {"image_size": 224, "norm": "batch"}),
    "vgg16_half": (VGG16, {"norm": "batch", "width": 0.5}),
    "vgg16_imagenet": (VGG16, {"image_size": 224}),
}


class Architecture(NamedTuple):
    """What `create_model` was called with, without weights: enough to build the model again.

    Attributes:
        name: The model's name.
        arguments: All others, ``num_classes`` and ``in_channels`` included.
    """

    name: str
    arguments: dict[str, Any]


def list_models(pattern: str = "*") -> list[str]:
    """Names that `create_model` takes.

    Args:
        pattern: Shell pattern, such as ``"*imagenet"``; one that begins with ``timm/`` asks timm.

    Returns:
        The names, in alphabetical order; those of timm only if the pattern asks for them.

    Example:
        >>> list_models("resnet*")
        ['resnet18', 'resnet18_imagenet']
    """
    if pattern.startswith(_TIMM):
        import timm  # lazy: it takes seconds

        return [f"{_TIMM}{name}" for name in timm.list_models(pattern.removeprefix(_TIMM))]
    return [name for name in _MODELS if fnmatch(name, pattern)]


def create_model(
    name: str,
    num_classes: int = 10,
    in_channels: int = 3,
    pretrained: bool | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    replace_head: bool | None = None,
    **arguments: Any,
) -> nn.Module:
    """Build a model by name, with random or with pretrained weights.

    Pretrained weights of another number of classes are loaded without their last layer, which is said. Nothing else may
    differ: a `WeightsError` lists every name that is missing, unexpected or of another shape. The transform that belongs to
    the weights is `input_transform` of the model.

    Args:
        name: One of `list_models`, or ``timm/NAME``.
        num_classes: Number of classes C; the output is ``[batch, C]``.
        in_channels: Channels of the images.
        pretrained: True for the weights that torchvision or timm publish, the name of some of them
            (``"IMAGENET1K_V1"``, ``"timm/resnet18.a1_in1k"``, for a timm model also the tag alone), the path of a file with
            a state dict, a state dict, or None for random weights.
        replace_head: Whether the last layer starts from random values. None: only if the number of classes differs.
        **arguments: Further arguments of the model's class.

    Returns:
        The model. Nothing in it is Bayesian.

    Example:
        >>> model = create_model("lenet5", num_classes=3, in_channels=1, image_size=28)
        >>> type(model).__name__, architecture(model).name
        ('LeNet5', 'lenet5')
    """
    model = _build(name, num_classes, in_channels, arguments)
    transform = None
    if pretrained is not None and pretrained is not False:
        state, transform, source = _weights(model, name, pretrained, {"in_channels": in_channels, **arguments})
        load_weights(model, state, source, replace_head)
    called = {"num_classes": num_classes, "in_channels": in_channels, **arguments}
    vars(model).update(zoo_architecture=Architecture(name, called), zoo_transform=transform)
    return model


def architecture(model: nn.Module) -> Architecture:
    """What `create_model` was called with.

    Args:
        model: A model that it built.

    Returns:
        Name and arguments.

    Raises:
        HyperparameterError: If something else built the model.
    """
    found = vars(model).get("zoo_architecture")
    if not isinstance(found, Architecture):
        raise HyperparameterError(
            f"This {type(model).__name__} does not know how it was built. Build it with zoo.create_model(name, ...), whose "
            f"names are {', '.join(_MODELS)}, and {_TIMM}NAME."
        )
    return found


def input_transform(model: nn.Module) -> ImageTransform | None:
    """The transform that belongs to a model's weights.

    Args:
        model: A model that `create_model` built.

    Returns:
        That of the data module that the model was fitted to, if this was one of images from here; else that of its
        pretrained weights; None if neither is known.
    """
    found = vars(model).get("zoo_transform")
    return found if isinstance(found, ImageTransform) else None


def _build(name: str, num_classes: int, in_channels: int, arguments: dict[str, Any]) -> nn.Module:
    if name.startswith(_TIMM):
        return timm_model(name.removeprefix(_TIMM), num_classes=num_classes, in_chans=in_channels, **arguments)
    if name not in _MODELS:
        raise HyperparameterError(f"There is no model {name!r}; there are {', '.join(_MODELS)}, and {_TIMM}NAME.")
    builder, form = _MODELS[name]
    known = [p for p in inspect.signature(builder).parameters if p not in {"num_classes", "in_channels"}]
    unknown = [argument for argument in arguments if argument not in known]
    if unknown:
        raise HyperparameterError(f"{name} takes no argument {', '.join(unknown)}; it takes {', '.join(known)}.")
    return builder(num_classes=num_classes, in_channels=in_channels, **{**form, **arguments})


def _weights(model: nn.Module, name: str, pretrained: Any, arguments: dict[str, Any]) -> PublishedWeights:
    if pretrained is True or _is_weights_name(pretrained):
        if not name.startswith(_TIMM):
            return published_weights(name, pretrained)
        return timm_weights(_timm_name(name, pretrained), in_chans=arguments.pop("in_channels"), **arguments)
    source = "The state dict" if isinstance(pretrained, Mapping) else os.fspath(pretrained)
    state = unwrapped(pretrained) if isinstance(pretrained, Mapping) else read_weights(pretrained)
    if name.startswith(_TIMM):
        return PublishedWeights(state, timm_transform(model), source)
    return PublishedWeights(state, imagenet_transform() if name.endswith("_imagenet") else None, source)


def _timm_name(name: str, pretrained: bool | str) -> str:
    """The model's name with the tag of the weights, which may be given alone or as all of ``timm/NAME.TAG``."""
    name = name.removeprefix(_TIMM)
    if pretrained is True:
        return name
    given = str(pretrained)
    return given.removeprefix(_TIMM) if given.startswith(_TIMM) else f"{name.partition('.')[0]}.{given}"


def _is_weights_name(pretrained: Any) -> bool:
    if not isinstance(pretrained, str) or pretrained.endswith(_FILES) or Path(pretrained).is_file():
        return False
    return pretrained.startswith(_TIMM) or os.sep not in pretrained
