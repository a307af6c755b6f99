"""Starts a fit from the weights of another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim.readout import read_checkpoint
from lightning_bayes.predictive import misfits


@final
class WarmStart(Callback):
    """Loads weights and buffers from a checkpoint before a fit; optimizer, schedule and epochs start from scratch.

    With `VOGNCallback` it adds noise to a network that OGN or Adam has trained. The first update has no noise and measures
    the curvature, and ``kl_warmup_steps`` lets the noise grow, as the authors of VOGN recommend (Osawa et al. 2019). A
    resumed fit (``ckpt_path``) uses the weights of its own checkpoint.

    Args:
        path: A Lightning checkpoint of a module with the same architecture.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load before the optimizer is built, which may read the weights.

        Raises:
            PosteriorError: If there is no checkpoint, or it is one of another architecture.
        """
        if stage != "fit" or trainer.ckpt_path:
            return
        try:
            weights = read_checkpoint(self.path)["state_dict"]
        except FileNotFoundError as error:
            raise PosteriorError(
                f"WarmStart found no checkpoint {self.path} below {Path.cwd()}. Train the network that this fit starts from "
                "first, or pass the path of its checkpoint."
            ) from error
        wrong = misfits(pl_module, weights)
        if wrong:
            raise PosteriorError(
                f"WarmStart cannot start from {self.path}, which is not a {type(pl_module).__name__} of this architecture "
                f"({wrong}). Build the module with the arguments that the checkpoint was trained with."
            )
        pl_module.load_state_dict(weights)
        rank_zero_info(f"The fit starts from the weights in {self.path}")
