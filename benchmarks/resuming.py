"""Training in several commands: a checkpoint every few epochs, and a deadline after which training stops."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.quiet import quiet_trainer


class Unfinished(Exception):
    """The time was used up; the run goes on from its checkpoint."""


class Kept(Callback):
    """Saves a checkpoint every `every` epochs and at the deadline, where training stops.

    The order of an epoch follows from seed and epoch, so a resumed run ends at the weights of an uninterrupted one.
    """

    def __init__(self, path: Path, seed: int, deadline: float | None = None, every: int = 5) -> None:
        self.path, self.seed, self.deadline, self.every, self.seconds = path, seed, deadline, every, 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed the order of the rows, their augmentation, and dropout."""
        seed, loader = 1000 * self.seed + trainer.current_epoch, trainer.train_dataloader
        loader.generator = (
            torch.Generator()
        )  # of the workers; Lightning calls iter() before this hook in the first epoch only
        loader.sampler.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self._start = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save when due."""
        self.seconds += time.process_time() - self._start
        epoch, last = trainer.current_epoch + 1, trainer.max_epochs
        late = self.deadline is not None and time.monotonic() > self.deadline
        if epoch != last and (late or epoch % self.every == 0):
            trainer.save_checkpoint(self.path.with_suffix(".new"))
            self.path.with_suffix(".new").replace(self.path)
            trainer.should_stop = late

    def state_dict(self) -> dict[str, Any]:
        """The seconds of the epochs so far."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with them."""
        self.seconds = state_dict["seconds"]


def fit(
    module: LightningModule, data: Any, kept: Kept, callbacks: list[Callback | None], epochs: int, **options: Any
) -> Trainer:
    """Train, or go on from the checkpoint.

    Args:
        module: The module to train.
        data: A data module, or a loader; ``validation=`` is a loader beside it.
        kept: Where and when checkpoints are saved.
        callbacks: The others.
        epochs: All epochs, those before the checkpoint included.
        **options: Arguments of the trainer.

    Returns:
        The trainer after the last epoch.

    Raises:
        Unfinished: At the deadline.
    """
    kept.path.parent.mkdir(parents=True, exist_ok=True)
    validation = options.pop("validation", None)
    trainer = quiet_trainer([*callbacks, kept], epochs, **options)
    trainer.fit(module, data, validation, ckpt_path=kept.path if kept.path.exists() else None)
    if trainer.current_epoch < epochs:
        raise Unfinished(f"{trainer.current_epoch} of {epochs} epochs are done")
    return trainer
