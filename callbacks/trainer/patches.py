"""Temporary changes of foreign objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, final


@final
class Patches:
    """Changes objects, and reverts all changes on `undo`."""

    def __init__(self) -> None:
        self._reverts = list[
            Callable[[], object]
        ]()  # no local functions, so that a copy reverts the changes of its copies

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute, or a property that has a setter, until `undo`."""
        if isinstance(getattr(type(target), name, None), property):
            self._reverts.append(partial(setattr, target, name, getattr(target, name)))
        else:
            before = {name: vars(target)[name]} if name in vars(target) else {}
            self._reverts.append(partial(_restore, target, name, before))
        setattr(target, name, value)

    def on_undo(self, revert: Callable[[], object]) -> None:
        """Call `revert` on `undo`."""
        self._reverts.append(revert)

    def undo(self) -> None:
        """Revert the changes, in reverse order."""
        with ExitStack() as stack:  # calls all of them, also after an error
            for revert in self._reverts:
                stack.callback(revert)
            self._reverts = []


def _restore(target: Any, name: str, before: dict[str, Any]) -> None:
    vars(target).pop(name, None)
    if before:
        setattr(target, name, before[name])
