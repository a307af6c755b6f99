"""Starts a fit from the weights of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_bayes.callbacks.trainer.arguments import checked
from lightning_bayes.errors import PosteriorError
from lightning_bayes.optim.readout import read_checkpoint
from lightning_bayes.predictive import misfits


@final
class WarmStart(Callback):
    """Loads weights and buffers from a checkpoint before a fit; optimizer, schedule and epochs start from scratch.

    With `VOGNCallback` it adds noise to a network trained by OGN or Adam. The first update has no noise and measures the
    curvature, and ``kl_warmup_steps`` increases the noise gradually, as the authors of VOGN recommend (Osawa et al. 2019). A
    resumed fit (``ckpt_path``) uses the weights of the checkpoint that it resumes from.

    Args:
        path: A Lightning checkpoint of a module with the same architecture.
    """

    @checked
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the weights before the optimizer is built, which may read them.

        Raises:
            PosteriorError: If the checkpoint does not exist or belongs to another architecture.
        """
        if stage != "fit" or trainer.ckpt_path:
            return
        try:
            weights = read_checkpoint(self.path)["state_dict"]
        except FileNotFoundError as error:
            raise PosteriorError(
                f"WarmStart found no checkpoint {self.path} below {Path.cwd()}. First train the network to start from, or "
                "pass the path of its checkpoint."
            ) from error
        mismatch = misfits(pl_module, weights)
        if mismatch:
            raise PosteriorError(
                f"WarmStart cannot start from {self.path}, which is not a {type(pl_module).__name__} of this architecture "
                f"({mismatch}). Build the module with the arguments that the checkpoint was trained with."
            )
        pl_module.load_state_dict(weights)
        rank_zero_info(f"The fit starts from the weights in {self.path}")
