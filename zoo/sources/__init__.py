"""Where `create_model` finds models: the registry, timm and torchvision, told apart by the prefix of the name."""

from __future__ import annotations

from typing import Final

from lightning_bayes.zoo.sources.registered import RegisteredModels
from lightning_bayes.zoo.sources.source import ModelSource
from lightning_bayes.zoo.sources.timm_models import TimmModels
from lightning_bayes.zoo.sources.torchvision_models import TorchvisionModels

__all__ = ["ModelSource", "known_names", "source_of"]

_BY_PREFIX: Final[dict[str, ModelSource]] = {"timm/": TimmModels(), "torchvision/": TorchvisionModels()}
_REGISTERED: Final = RegisteredModels()


def source_of(name: str) -> tuple[ModelSource, str]:
    """The source of a model.

    Args:
        name: A name of `create_model`.

    Returns:
        The source, and the name without its prefix.
    """
    prefix, slash, rest = name.partition("/")
    source = _BY_PREFIX.get(prefix + slash)
    return (_REGISTERED, name) if source is None else (source, rest)


def known_names() -> str:
    """All names of `create_model`, for error messages."""
    return f"{', '.join(_REGISTERED.names('*'))}, {' and '.join(f'{prefix}NAME' for prefix in _BY_PREFIX)}"
