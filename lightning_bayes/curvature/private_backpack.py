"""Every private symbol of BackPACK that this package uses, and the tested version.

BackPACK has no function that undoes `extend`, and no public access to its table of layers. Other files call the functions
below instead of using private symbols.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

from backpack.context import CTX
from torch import nn

from lightning_bayes.errors import UnsupportedTrainingError

TESTED: Final = "1.7.1"

_LAYER_TABLE = "_BackpropExtension__module_extensions"  # attribute of an extension: module extensions by layer type
_EXTENDED = "_backpack_extend"  # attribute of a module with hooks
_HANDLES = "hook_handles"  # attribute of the context: the handle of every hook


def _required(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise UnsupportedTrainingError(
            f"BackPACK {version('backpack-for-pytorch')} is not supported: {type(owner).__name__}.{name} is missing. "
            f"Install backpack-for-pytorch {TESTED} (tested)."
        )
    return getattr(owner, name)


def supported_layers(extension: Any) -> set[type[nn.Module]]:
    """The layer types that an extension such as ``backpack.extensions.DiagGGNExact()`` supports."""
    return set(_required(extension, _LAYER_TABLE))


def layer_extension(extension: Any, kind: type[nn.Module]) -> Any:
    """The module extension that an extension has for a layer type; None if there is none."""
    return _required(extension, _LAYER_TABLE).get(kind)


def hook_handles() -> list[Any]:
    """The list of the handles of all BackPACK hooks. BackPACK never removes any; the caller may."""
    handles: list[Any] = _required(CTX, _HANDLES)
    return handles


def is_backpacks(attribute: str) -> bool:
    """Whether BackPACK sets a module attribute of this name."""
    return attribute in {_EXTENDED, "output"} or attribute.removeprefix("input").isdecimal()
