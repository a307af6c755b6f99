"""The patches of Lightning's trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure

from lightning_bayes.callbacks.checkpoint_io import AtomicCheckpointIO
from lightning_bayes.callbacks.patches import Patches
from lightning_bayes.callbacks.private_lightning import wrap_closures


def use_atomic_files(trainer: Trainer) -> None:
    """Write and read checkpoints with `AtomicCheckpointIO`, unless the user passed a plugin.

    Lightning tears the plugin down at the very end of a run, after the `on_exception` of callbacks that save a last
    checkpoint. The teardown undoes the patch.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        patches = Patches()
        patches.set(trainer.strategy, "checkpoint_io", AtomicCheckpointIO(on_teardown=patches.undo))


def patch_fit(
    trainer: Trainer,
    patches: Patches,
    *,
    after_setup: Callable[[], None],
    wrap_closure: Callable[[Closure], Closure],
    load_checkpoint: Callable[..., dict[str, Any]],
) -> None:
    """Patch a trainer that is about to fit.

    Args:
        trainer: The trainer.
        patches: Holds the patches, and undoes them.
        after_setup: Called after the strategy has set up the user's optimizer and before its state is restored.
        wrap_closure: Takes Lightning's closure for a batch and returns the closure to run.
        load_checkpoint: Replaces the strategy's method of this name.
    """
    strategy: Any = trainer.strategy
    set_up = strategy.setup_optimizers

    def setup_optimizers(trainer: Trainer) -> None:
        set_up(trainer)
        after_setup()

    patches.set(strategy, "load_checkpoint", load_checkpoint)
    patches.set(strategy, "setup_optimizers", setup_optimizers)
    wrap_closures(trainer, wrap_closure, patches)
