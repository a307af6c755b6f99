"""Restores the module's weights if a run cannot resume from its checkpoint."""

from __future__ import annotations

from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor

from lightning_bayes.curvature.sharding import local
from lightning_bayes.errors import BayesError, PosteriorError


@final
class RollbackOnFailedResume:
    """Loads a checkpoint, and restores the module's old weights if the run does not start.

    Lightning copies the matching weights before it raises an error about the others, and before it restores the optimizer.

    Args:
        strategy: The strategy that loads the checkpoint.
        module: The user's module.
    """

    def __init__(self, strategy: Strategy, module: LightningModule) -> None:
        self._load, self._module = strategy.load_checkpoint, module
        # This strategy loads weights and optimizer together, before `require_same_order` can check the optimizer state.
        self._loads_optimizer = isinstance(strategy, ModelParallelStrategy)
        self._old_weights: dict[str, Tensor] = {}
        self._has_started = False

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Replacement of the strategy's method of this name.

        Args:
            path: The checkpoint.
            *arguments: As Lightning passes them.
            **options: As Lightning passes them.

        Returns:
            Contents of the checkpoint.

        Raises:
            PosteriorError: If `ModelParallelStrategy` cannot load it into the module and the optimizer.
        """
        if not self._has_started:  # Lightning's tuner also restores in the middle of a run
            self._old_weights = {name: value.clone() for name, value in self._tensors().items()}
        try:
            return self._load(path, *arguments, **options)
        except Exception as error:
            if not self._loads_optimizer or isinstance(error, BayesError):
                raise
            raise PosteriorError(
                f"{path} cannot be loaded into this model and optimizer ({type(error).__name__}: {error}). Resume with the "
                "model and the callback that wrote it. To start from its weights alone, load them in configure_model."
            ) from error

    def commit(self) -> None:
        """Forget the old weights: the run has started."""
        self._old_weights, self._has_started = {}, True

    @torch.no_grad()
    def roll_back(self) -> None:
        """Restore the old weights unless the run has started."""
        current = self._tensors()
        for name, value in self._old_weights.items():
            current[name].copy_(value)
        self._old_weights = {}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: local(value) for name, value in self._module.state_dict().items() if isinstance(value, Tensor)}
