"""What the seam needs of the trainer and the module, refused in words before anything is swapped."""

from __future__ import annotations

import inspect

from lightning import __version__ as lightning_version
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_bayes.errors import UnsupportedTrainingError

TESTED_LIGHTNING = "2.5 to 2.6"


def check_training(trainer: Trainer, pl_module: LightningModule) -> None:
    """Require a training set-up that a noisy optimizer can be swapped into.

    Args:
        trainer: The trainer.
        pl_module: The user's module.

    Raises:
        UnsupportedTrainingError: Naming what is in the way.
    """
    if not pl_module.automatic_optimization:
        raise UnsupportedTrainingError(
            f"{type(pl_module).__name__} uses manual optimization, where the callback sees no steps. Build the optimizer "
            "yourself, opt = lightning_bayes.VOGN(self, num_data=N), and train with `with opt.sampled_params(): "
            "loss.backward()` and opt.step()."
        )
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise UnsupportedTrainingError(
            f"The strategy {type(trainer.strategy).__name__} splits or moves parameters in ways that sampling does not "
            "follow. Use one device, or strategy='ddp'."
        )
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise UnsupportedTrainingError(
            f"{type(pl_module).__name__}.training_step takes dataloader_iter, so each weight sample would consume another "
            "batch. Take batch instead."
        )
    _check_lightning(trainer)


def _check_lightning(trainer: Trainer) -> None:
    """The seam uses one private method of Lightning; see `closure`."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    found = list(inspect.signature(getattr(loop, "_make_closure", lambda: None)).parameters)
    parts = list(inspect.signature(Closure.__init__).parameters)[1:4]
    # A second callback of the family, or a second setup, sees the first one's replacement: its signature is the same.
    if found != ["kwargs", "optimizer", "batch_idx"] or parts != ["step_fn", "backward_fn", "zero_grad_fn"]:
        raise UnsupportedTrainingError(
            f"Lightning {lightning_version} builds its training closure in a way this version does not know (tested: "
            f"{TESTED_LIGHTNING}). Install a tested version of lightning."
        )
