"""Temporary training and evaluation modes: backward measures every layer in the mode of its forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn


def in_train_modes(modes: Iterable[tuple[nn.Module, bool]]) -> AbstractContextManager[None]:
    """Set modules to training (True) or evaluation mode inside the context, and restore their modes on exit."""
    changed = [module for module, training in modes if module.training != training]
    return _switched(changed) if changed else nullcontext()


@contextmanager
def _switched(modules: list[nn.Module]) -> Iterator[None]:
    for module in modules:
        module.training = not module.training
    try:
        yield
    finally:
        for module in modules:
            module.training = not module.training
