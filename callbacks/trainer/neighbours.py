"""The other callbacks of a trainer."""

from __future__ import annotations

from typing import TypeVar

from lightning.pytorch import Callback, Trainer

_Kind = TypeVar("_Kind")


def callbacks_of(trainer: Trainer, kind: type[_Kind]) -> list[_Kind]:
    """The callbacks of a kind, in the trainer's order."""
    return [callback for callback in _all(trainer) if isinstance(callback, kind)]


def insert_after(trainer: Trainer, new: Callback, *before: Callback) -> None:
    """Add a callback behind the last of others that the trainer has; their hooks run before its own."""
    callbacks = _all(trainer)
    callbacks.insert(1 + max(callbacks.index(callback) for callback in before), new)


def is_missing(trainer: Trainer, callback: Callback) -> bool:
    """Whether a callback is not among the trainer's, as while a tuner trains."""
    return callback not in trainer.callbacks  # type: ignore[attr-defined]  # as below; this runs in every batch


def remove(trainer: Trainer, callback: Callback) -> None:
    """Remove a callback; a loop over the trainer's callbacks that runs now still ends."""
    trainer.callbacks = [other for other in _all(trainer) if other is not callback]  # type: ignore[attr-defined]


def _all(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # which Lightning does not annotate
    return callbacks
