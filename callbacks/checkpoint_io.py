"""Checkpoint files that are whole or not there, and are read whole or refused by name.

Lightning writes into the directory for temporary files and moves the result. Between two file systems a move is a copy, so a
kill or a full disk leaves half a file in the place of the last whole one. And `torch.load` does not look at the checksums
that `torch.save` has written: a flipped bit in a weight goes unnoticed.
"""

from __future__ import annotations

from numbers import Number
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_bayes.posteriors import atomic_save, named_if_unreadable, require_checkpoint, verify_checksums


class WholeFileIO(TorchCheckpointIO):
    """Writes beside the file and renames; verifies checksums before reading.

    The callbacks put it in the place of Lightning's default. Remote files (``s3://...``) and other plugins stay Lightning's.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint; the file that was there stays whole until the new one is.

        What cannot be written, such as on a full disk, is a `CheckpointError`.

        Args:
            checkpoint: What to write.
            path: Where.
            storage_options: Not supported, as in Lightning's own.
        """
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        advice = "Free space or choose another directory, and go on with ckpt_path=..."
        atomic_save(path, checkpoint, "checkpoint", advice)

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint, or refuse one that is damaged or no checkpoint of Lightning, before anything is changed.

        Args:
            path: The file.
            *arguments: As Lightning passes them.
            **options: As Lightning passes them.

        Returns:
            Its contents.
        """
        if not _is_remote(path):
            verify_checksums(path)
        with named_if_unreadable(path):
            checkpoint = super().load_checkpoint(path, *arguments, **options)
        return require_checkpoint(checkpoint, path)


def use_whole_files(trainer: Trainer) -> None:
    """Let a trainer write and read with `WholeFileIO`, unless it has a plugin of the user's.

    Args:
        trainer: The trainer.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeFileIO()


def take_plain_numbers(checkpoint: dict[str, Any]) -> None:
    """Put Python's numbers in the place of NumPy's, which a safe load refuses, into what optimizers and schedulers keep.

    A schedule of the user's own that computes with NumPy leaves such numbers behind as learning rates.

    Args:
        checkpoint: Lightning's, before it is written; changed.
    """
    for key in ("optimizer_states", "lr_schedulers"):
        if key in checkpoint:
            checkpoint[key] = apply_to_collection(checkpoint[key], Number, _plain, allow_frozen=True)


def _plain(number: Any) -> Any:
    return number.item() if hasattr(number, "item") else number


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
