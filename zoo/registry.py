"""Registry of models and data modules. Each registers itself in its own file, inside or outside this package.

Example:
    >>> from torch import nn
    >>> @register_model("tiny")
    ... class Tiny(nn.Linear):
    ...     def __init__(self, num_classes: int, in_channels: int) -> None:
    ...         super().__init__(in_channels, num_classes)
    >>> from lightning_bayes.zoo import create_model
    >>> create_model("tiny", num_classes=3, in_channels=2)
    Tiny(in_features=2, out_features=3, bias=True)
    >>> del MODELS["tiny"]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, final

from lightning.pytorch import LightningDataModule
from torch import Tensor, nn

from lightning_bayes.errors import HyperparameterError

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])
DataModule = TypeVar("DataModule", bound=type[LightningDataModule])
StateMap = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@final
@dataclass(frozen=True)
class ModelEntry:
    """A registered model name."""

    builder: Callable[..., nn.Module]  # called with num_classes and in_channels
    arguments: dict[str, Any] = field(default_factory=dict)  # that the name implies
    torchvision: str | None = None  # the torchvision model whose published weights this model loads
    from_timm: StateMap = dict  # converts a state dict of timm's model with the same architecture

    @property
    def options(self) -> list[str]:
        """The builder's arguments other than ``num_classes`` and ``in_channels``."""
        parameters = inspect.signature(self.builder).parameters
        return [name for name in parameters if name not in {"num_classes", "in_channels"}]

    @property
    def class_path(self) -> str:
        """Import path of the builder, as written in configs."""
        return import_path(self.builder)


def import_path(item: Any) -> str:
    """The import path of a class or function, as written in configs."""
    return f"{item.__module__}.{item.__qualname__}"


MODELS: Final[dict[str, ModelEntry]] = {}
DATA: Final[dict[str, type[LightningDataModule]]] = {}


def register_model(
    name: str, *, torchvision: str | None = None, from_timm: StateMap = dict, **arguments: Any
) -> Callable[[Builder], Builder]:
    """Register a model for `create_model` and the command line.

    Args:
        name: The model name. A class may have several names, each with its own `arguments`.
        torchvision: The torchvision model whose published weights this model loads; parameter names must match.
        from_timm: Converts timm's weights for the same architecture; by default they are loaded unchanged.
        **arguments: Extra arguments that this name passes to the class.

    Returns:
        A decorator for a class or function that takes ``num_classes`` and ``in_channels`` and returns the model.
    """

    def register(builder: Builder) -> Builder:
        _require_free(name, MODELS[name].builder if name in MODELS else None, builder)
        MODELS[name] = ModelEntry(builder, arguments, torchvision, from_timm)
        return builder

    return register


def register_data(name: str) -> Callable[[DataModule], DataModule]:
    """Register a data module for the command line.

    The command line reads the input shape from the class attributes ``num_classes``, ``in_channels`` and ``image_size``, or
    from a dictionary ``composed_values`` with these keys. Where that dictionary has None for ``num_classes``, it calls the
    classmethod ``count_classes(root)``. A class with a classmethod ``test_images(root)`` that returns uint8 images
    ``[N, channels, height, width]`` can also serve as an out-of-distribution set.

    Args:
        name: The name of the data set.

    Returns:
        A decorator for the class.
    """

    def register(module: DataModule) -> DataModule:
        _require_free(name, DATA.get(name), module)
        DATA[name] = module
        return module

    return register


def _require_free(name: str, registered: Any, new: Any) -> None:
    """Reject a name that another object uses. A module that is imported again may replace its own entry."""
    if registered is not None and import_path(registered) != import_path(new):
        raise HyperparameterError(
            f"{import_path(new)} cannot be registered as {name!r}, because {import_path(registered)} already uses this "
            "name. Choose another name."
        )
