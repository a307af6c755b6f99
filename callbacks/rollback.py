"""A resumed run that is refused leaves the module as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor


@final
class RollbackOnFailedResume:
    """Loads a checkpoint's weights and restores the old ones if the run does not start.

    Lightning copies the weights that fit before it complains about those that do not, and before it restores the optimizer.

    Args:
        strategy: Loads the weights.
        module: The user's module.
    """

    def __init__(self, strategy: Strategy, module: LightningModule) -> None:
        self._load, self._module = strategy.load_model_state_dict, module
        self._before: dict[str, Tensor] = {}
        self._has_started = False

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights in place of the strategy's method of this name.

        Args:
            checkpoint: Contents of a checkpoint.
            strict: Whether the names must be the same.
        """
        if not self._has_started:  # Lightning's tuner restores in the middle of a run
            self._before = {name: value.clone() for name, value in self._tensors().items()}
        self._load(checkpoint, strict=strict)

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
        return {name: value for name, value in self._module.state_dict().items() if isinstance(value, Tensor)}
