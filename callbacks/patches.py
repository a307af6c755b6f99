"""Temporary changes of foreign objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

_MISSING: Any = object()


@final
class Patches:
    """Changes objects, and reverts all changes on `undo`."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute, or a property that has a setter, until `undo`."""
        if isinstance(getattr(type(target), name, None), property):
            self._undo.callback(setattr, target, name, getattr(target, name))
        else:
            self._undo.callback(_restore, target, name, vars(target).get(name, _MISSING))
        setattr(target, name, value)

    def on_undo(self, revert: Callable[[], object]) -> None:
        """Call `revert` on `undo`."""
        self._undo.callback(revert)

    def undo(self) -> None:
        """Revert the changes, in reverse order."""
        self._undo.close()


def _restore(target: Any, name: str, value: Any) -> None:
    vars(target).pop(name, None)
    if value is not _MISSING:
        setattr(target, name, value)
