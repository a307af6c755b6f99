"""A resumed run that is refused leaves the module as it was."""

from __future__ import annotations

from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor

from lightning_bayes.curvature.spread import local
from lightning_bayes.errors import BayesError, PosteriorError


@final
class RollbackOnFailedResume:
    """Loads a checkpoint and restores the module's weights if the run does not start.

    Lightning copies the weights that fit before it complains about those that do not, and before it restores the optimizer.

    Args:
        strategy: Loads the checkpoint.
        module: The user's module.
    """

    def __init__(self, strategy: Strategy, module: LightningModule) -> None:
        self._load, self._module = strategy.load_checkpoint, module
        self._is_all_at_once = isinstance(
            strategy, ModelParallelStrategy
        )  # weights and optimizer, before any check of ours
        self._before: dict[str, Tensor] = {}
        self._has_started = False

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Load a checkpoint in place of the strategy's method of this name.

        Args:
            path: The checkpoint.
            *arguments: As Lightning passes them.
            **options: As Lightning passes them.

        Returns:
            Its contents.

        Raises:
            PosteriorError: If `ModelParallelStrategy` cannot load it into the module and the optimizer.
        """
        if not self._has_started:  # Lightning's tuner restores in the middle of a run
            self._before = {name: value.clone() for name, value in self._tensors().items()}
        try:
            return self._load(path, *arguments, **options)
        except Exception as error:
            if not self._is_all_at_once or isinstance(error, BayesError):
                raise
            raise PosteriorError(
                f"{path} cannot be loaded into this model and optimizer ({type(error).__name__}: {error}). Resume with the "
                "model and the callback that wrote it; to start from its weights alone, load them in configure_model."
            ) from error

    def commit(self) -> None:
        """Forget the old weights: the run has started."""
        self._before, self._has_started = {}, True

    @torch.no_grad()
    def roll_back(self) -> None:
        """Restore the old weights unless the run has started."""
        now = self._tensors()
        for name, value in self._before.items():
            now[name].copy_(value)
        self._before = {}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: local(value) for name, value in self._module.state_dict().items() if isinstance(value, Tensor)}
