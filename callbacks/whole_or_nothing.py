"""A resumed run that does not begin leaves the module as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor


class WholeOrNothing:
    """Loads a checkpoint's weights, and takes them back if what follows is refused.

    Lightning copies the weights that fit before it complains of those that do not, and before it looks at the optimizer.

    Args:
        strategy: Loads the weights.
        module: The user's module.
    """

    def __init__(self, strategy: Strategy, module: LightningModule) -> None:
        self._load, self._module = strategy.load_model_state_dict, module
        self._before: dict[str, Tensor] = {}
        self._has_begun = False

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take the place of the strategy's method.

        Args:
            checkpoint: Contents of a checkpoint.
            strict: Whether the names must be the same.
        """
        if not self._has_begun:  # Lightning's tuner restores in the middle of a run
            self._before = {name: value.clone() for name, value in self._tensors().items()}
        self._load(checkpoint, strict=strict)

    def keep(self) -> None:
        """Forget the weights from before: the run has begun."""
        self._before, self._has_begun = {}, True

    @torch.no_grad()
    def undo(self) -> None:
        """Put the weights from before back, if they were not forgotten."""
        now = self._tensors()
        for name, value in self._before.items():
            now[name].copy_(value)
        self._before = {}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._module.state_dict().items() if isinstance(value, Tensor)}
