"""Models and data sets by name. Each registers itself in its own file, inside this package or outside of it.

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
    """One name of `create_model`.

    Attributes:
        builder: The class or function, called with ``num_classes`` and ``in_channels``.
        arguments: Further arguments that this name stands for.
        torchvision: The torchvision model whose published weights this one loads.
        from_timm: Renames a state dict of the timm model with the same architecture.
    """

    builder: Callable[..., nn.Module]
    arguments: dict[str, Any] = field(default_factory=dict)
    torchvision: str | None = None
    from_timm: StateMap = dict

    @property
    def options(self) -> list[str]:
        """The builder's arguments beside ``num_classes`` and ``in_channels``."""
        return [name for name in inspect.signature(self.builder).parameters if name not in _ALWAYS]

    @property
    def class_path(self) -> str:
        """Import path of the builder, as configs name it."""
        return f"{self.builder.__module__}.{self.builder.__qualname__}"


MODELS: Final[dict[str, ModelEntry]] = {}
DATA: Final[dict[str, type[LightningDataModule]]] = {}
_ALWAYS: Final = ("num_classes", "in_channels")


def register_model(
    name: str, *, torchvision: str | None = None, from_timm: StateMap = dict, **arguments: Any
) -> Callable[[Builder], Builder]:
    """Make a model known to `create_model` and, by its name, to the command line.

    Args:
        name: The name. A class may have several, each with its own `arguments`.
        torchvision: The torchvision model whose published weights this one loads, under the same parameter names.
        from_timm: Renames the parameters of timm's weights for the same architecture; by default nothing is renamed.
        **arguments: Arguments of the class that this name stands for.

    Returns:
        A decorator for a class or a function that takes ``num_classes`` and ``in_channels`` and returns the model.
    """

    def register(builder: Builder) -> Builder:
        entry = ModelEntry(builder, arguments, torchvision, from_timm)
        _require_free(name, MODELS[name].builder if name in MODELS else None, builder)
        MODELS[name] = entry
        return builder

    return register


def register_data(name: str) -> Callable[[DataModule], DataModule]:
    """Make a data module known to the command line.

    A class with a classmethod ``test_images(root)``, which returns bytes ``[N, channels, height, width]``, can also be named
    as a set out of distribution. The command line reads the input's shape from the class attributes ``num_classes``,
    ``in_channels`` and ``image_size``, or from a dictionary ``composed_values`` of them. A classmethod
    ``count_classes(root)`` tells the number of classes where that dictionary has None.

    Args:
        name: The name.

    Returns:
        A decorator for the class.
    """

    def register(module: DataModule) -> DataModule:
        _require_free(name, DATA.get(name), module)
        DATA[name] = module
        return module

    return register


def _require_free(name: str, known: Any, new: Any) -> None:
    """Refuse a second object of the same name; a module that is imported again replaces its own."""
    if known is not None and (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise HyperparameterError(
            f"{new.__module__}.{new.__qualname__} is registered as {name!r}, which is the name of "
            f"{known.__module__}.{known.__qualname__}. Choose another name."
        )
