"""The patches of Lightning's trainer during a fit, and their removal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure

from lightning_bayes.callbacks.checkpoint_io import AtomicCheckpointIO
from lightning_bayes.callbacks.patches import Patches
from lightning_bayes.callbacks.private_lightning import wrap_closures


@final
class LightningSeam:
    """Patches a trainer and undoes every patch, also after exceptions and Ctrl-C."""

    def __init__(self) -> None:
        self._fit, self._files = Patches(), Patches()

    def use_atomic_files(self, trainer: Trainer) -> None:
        """Write and read checkpoints with `AtomicCheckpointIO`, unless the user passed a plugin.

        Lightning tears the plugin down at the very end of a run, after the `on_exception` of callbacks that save a last
        checkpoint. The teardown undoes the patch.
        """
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self._files.set(trainer.strategy, "checkpoint_io", AtomicCheckpointIO(on_teardown=self._files.undo))

    def patch_fit(
        self,
        trainer: Trainer,
        *,
        after_setup: Callable[[], None],
        wrap_closure: Callable[[Closure], Closure],
        load_checkpoint: Callable[..., dict[str, Any]],
    ) -> None:
        """Patch a trainer that is about to fit.

        Args:
            trainer: The trainer.
            after_setup: Called after the strategy has set up the user's optimizer and before its state is restored.
            wrap_closure: Takes Lightning's closure for a batch and returns the closure to run.
            load_checkpoint: Replaces the strategy's method of this name.
        """
        strategy: Any = trainer.strategy
        set_up = strategy.setup_optimizers

        def setup_optimizers(trainer: Trainer) -> None:
            set_up(trainer)
            after_setup()

        self._fit.set(strategy, "load_checkpoint", load_checkpoint)
        self._fit.set(strategy, "setup_optimizers", setup_optimizers)
        wrap_closures(trainer, wrap_closure, self._fit)

    def undo_fit(self) -> None:
        """Undo the patches of a fit. The checkpoint plugin stays until Lightning tears it down."""
        self._fit.undo()

    def undo(self) -> None:
        """Undo all patches."""
        self._fit.undo()
        self._files.undo()
