"""Atomic, verified checkpoint files, and the contents that the callbacks change before a checkpoint is written.

Lightning writes to the directory for temporary files and moves the result. Between two file systems a move is a copy, so a
kill or a full disk leaves a truncated file in place of the last good one. And `torch.load` ignores the checksums that
`torch.save` writes, so a flipped bit in a weight goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from pathlib import Path
from typing import Any, final

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_bayes.callbacks.trainer.patches import Patches
from lightning_bayes.optim.readout import require_checkpoint
from lightning_bayes.posteriors import atomic_save, named_if_unreadable, verify_checksums


@final
class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file in the same folder and renames it; verifies checksums before reading."""

    def __init__(self, on_teardown: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._on_teardown = on_teardown

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint; an existing file stays intact until the new one is complete."""
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        advice = "Free space or choose another directory, and resume with ckpt_path=..."
        atomic_save(path, checkpoint, "checkpoint", advice)

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint; an error names the file if it is damaged or not a Lightning checkpoint."""
        if not _is_remote(path):
            verify_checksums(path)
        with named_if_unreadable(path):
            checkpoint = super().load_checkpoint(path, *arguments, **options)
        return require_checkpoint(checkpoint, path)

    def teardown(self) -> None:
        """Tear down at the end of a run."""
        super().teardown()
        if self._on_teardown is not None:
            self._on_teardown()


def use_atomic_files(trainer: Trainer) -> None:
    """Write and read checkpoints with `AtomicCheckpointIO`, unless the user passed a plugin."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        patches = Patches()
        patches.set(trainer.strategy, "checkpoint_io", AtomicCheckpointIO(on_teardown=patches.undo))


def store_mean(checkpoint: dict[str, Any], module: LightningModule, mean: dict[nn.Parameter, Tensor]) -> None:
    """Replace the weight sample of an open pass in a checkpoint by the mean; `mean` is empty outside of a pass."""
    for name, param in module.named_parameters(remove_duplicate=False):
        if param in mean and name in checkpoint["state_dict"]:
            checkpoint["state_dict"][name] = mean[param]


def use_plain_numbers(checkpoint: dict[str, Any]) -> None:
    """Convert NumPy numbers in the states of optimizers and schedulers to Python numbers, in place."""
    for key in ("optimizer_states", "lr_schedulers"):
        if key in checkpoint:
            checkpoint[key] = apply_to_collection(checkpoint[key], Number, _plain, allow_frozen=True)


def _plain(number: Any) -> Any:
    return number.item() if hasattr(number, "item") else number


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
