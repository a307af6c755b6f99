"""Every private symbol of BackPACK that this package uses, with the version that it was tested with.

BackPACK's `extend` has no counterpart that undoes it, and its table of layers has no public reader. What it keeps on modules
and in its context stands here once; code elsewhere calls the functions below.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

from backpack.context import CTX
from torch import nn

from lightning_bayes.errors import UnsupportedTrainingError

TESTED: Final = "1.7.1"

_LAYER_TABLE = "_BackpropExtension__module_extensions"  # of an extension: what it computes, by layer type
_EXTENDED = "_backpack_extend"  # attribute of a module with hooks
_HANDLES = "hook_handles"  # of the context: every hook ever set


def _required(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise UnsupportedTrainingError(
            f"BackPACK {version('backpack-for-pytorch')} is not supported: {type(owner).__name__}.{name} is missing. "
            f"Install backpack-for-pytorch {TESTED} (tested)."
        )
    return getattr(owner, name)


def known_layers(extension: Any) -> set[type[nn.Module]]:
    """The layer types that an extension of BackPACK has a rule for.

    Args:
        extension: Such as ``backpack.extensions.DiagGGNExact()``.

    Returns:
        Them.
    """
    return set(_required(extension, _LAYER_TABLE))


def layer_extension(extension: Any, kind: type[nn.Module]) -> Any:
    """An extension's own rule for a layer type.

    Args:
        extension: As in `known_layers`.
        kind: The type.

    Returns:
        BackPACK's module extension; None if there is none.
    """
    return _required(extension, _LAYER_TABLE).get(kind)


def hook_handles() -> list[Any]:
    """The handles of every hook that BackPACK has set; it keeps them for ever itself.

    Returns:
        The list, which can be shortened.
    """
    handles: list[Any] = _required(CTX, _HANDLES)
    return handles


def is_backpacks(attribute: str) -> bool:
    """Whether BackPACK sets an attribute of this name on modules."""
    return attribute in {_EXTENDED, "output"} or attribute.removeprefix("input").isdecimal()
