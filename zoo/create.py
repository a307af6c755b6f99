"""Models by name: registered models, timm models as ``timm/NAME``, and torchvision models as ``torchvision/NAME``.

Names that end in ``_imagenet`` are architectures for 224 × 224 images that can load torchvision's published weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

import lightning_bayes.zoo.models  # noqa: F401  (its files register themselves)
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.zoo.sources import known_names, source_of
from lightning_bayes.zoo.transforms import ImageTransform
from lightning_bayes.zoo.weights import load_weights, read_weights, unwrapped

_WEIGHTS_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors")


class Architecture(NamedTuple):
    """The arguments of a `create_model` call, without the weights: enough to rebuild the model."""

    name: str
    arguments: dict[str, Any]  # all others, including num_classes and in_channels


def list_models(pattern: str = "*") -> list[str]:
    """The names that `create_model` accepts and a shell pattern matches, such as ``"timm/resnet*"``, sorted."""
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
    """Build a model by name, with random or pretrained weights.

    If the pretrained weights have a different number of classes, they are loaded without the last layer, and a message says
    so. Nothing else may differ: a `WeightsError` lists every tensor that is missing, unexpected or of a different shape.
    Afterwards, `input_transform` returns the transform that the weights were trained with.

    Args:
        name: A name from `list_models`, ``timm/NAME`` or ``torchvision/NAME``.
        num_classes: Number of classes C; the output is ``[batch, C]``. None is allowed only in command-line configs, which
            fill in the number of classes of the data.
        in_channels: Number of image channels.
        pretrained: True for the default weights that torchvision or timm publish; the name of published weights
            (``"IMAGENET1K_V1"``, ``"timm/resnet18.a1_in1k"``, or only the tag for a timm model); the path of a state dict
            file; a state dict; or None for random weights.
        replace_head: Whether to keep the randomly initialised last layer. None does so only if the number of classes
            differs.
        **arguments: Extra arguments of the model class.

    Returns:
        The model, an ordinary ``nn.Module``.

    Raises:
        HyperparameterError: If `num_classes` is None.

    Example:
        >>> model = create_model("lenet5", num_classes=3, in_channels=1, image_size=28)
        >>> type(model).__name__, architecture(model).name
        ('LeNet5', 'lenet5')
    """
    if num_classes is None:
        raise HyperparameterError(f"create_model({name!r}) got num_classes=None. Pass the number of classes.")
    source, short_name = source_of(name)
    model = source.build(short_name, num_classes, in_channels, **arguments)
    transform = None
    if pretrained is True or _names_published_weights(pretrained):
        tag = None if pretrained is True else str(pretrained)
        state, transform, origin = source.published(short_name, tag, in_channels, **arguments)
        load_weights(model, state, origin, replace_head)
    elif isinstance(pretrained, Mapping):
        transform = source.transform(short_name, model)
        load_weights(model, unwrapped(pretrained), replace_head=replace_head)
    elif pretrained:
        transform = source.transform(short_name, model)
        load_weights(model, read_weights(pretrained), os.fspath(pretrained), replace_head)
    all_arguments = {"num_classes": num_classes, "in_channels": in_channels, **arguments}
    vars(model).update(zoo_architecture=Architecture(name, all_arguments), zoo_transform=transform)
    return model


def architecture(model: nn.Module) -> Architecture:
    """The name and the arguments of the `create_model` call that built a model."""
    built = known_architecture(model)
    if built is None:
        raise HyperparameterError(
            f"This {type(model).__name__} was not built by create_model. Build it with zoo.create_model(name, ...), where "
            f"name is one of {known_names()}."
        )
    return built


def known_architecture(model: nn.Module) -> Architecture | None:
    """The arguments of the `create_model` call that built a model, or None if `create_model` did not build it."""
    built = vars(model).get("zoo_architecture")
    return built if isinstance(built, Architecture) else None


def input_transform(model: nn.Module) -> ImageTransform | None:
    """The transform of the image data module that the model was last fitted on, or of its pretrained weights, or None."""
    transform = vars(model).get("zoo_transform")
    return transform if isinstance(transform, ImageTransform) else None


def class_names(model: nn.Module) -> tuple[str, ...]:
    """The class names of the data module that a `create_model` model was last fitted on; empty if unknown."""
    return tuple(vars(model).get("zoo_class_names", ()))


def attach_to_models(trainer: Any, transform: ImageTransform, class_names: Sequence[str]) -> None:
    """Attach the input transform and the class names of the data to the `create_model` models of a fit."""
    module = getattr(trainer, "lightning_module", None)
    for model in module.modules() if module is not None else ():
        if known_architecture(model) is None:
            continue
        previous = input_transform(model)
        if previous not in {None, transform}:
            rank_zero_info(
                f"The weights of {type(model).__name__} were trained with {previous}, but this fit uses {transform}, which "
                "save_posterior will store."
            )
        vars(model).update(zoo_transform=transform, zoo_class_names=tuple(class_names))


def _names_published_weights(pretrained: Any) -> bool:
    if not isinstance(pretrained, str) or pretrained.endswith(_WEIGHTS_SUFFIXES) or Path(pretrained).is_file():
        return False
    return pretrained.startswith("timm/") or os.sep not in pretrained
