"""Whether a user's step writes files: a step that does must not run once for each sample."""

from __future__ import annotations

import builtins
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from lightning_bayes.callbacks.trainer.patches import Patches

_WRITING: Final = frozenset("wax+")  # modes of `open`


@contextmanager
def written_files() -> Iterator[list[str]]:
    """Context that notes the files opened for writing by Python's `open`, which most libraries use, or by `torch.save`."""
    found: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and _WRITING & set(mode):
                found.append(str(file))
            return function(file, mode, *args, **kwargs)

        return noted

    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(str(f))
        return save(obj, f, *args, **kwargs)

    save, patches = torch.save, Patches()
    patches.set(builtins, "open", noting(builtins.open))
    patches.set(io, "open", noting(io.open))
    patches.set(torch, "save", saved)
    try:
        yield found
    finally:
        patches.undo()
