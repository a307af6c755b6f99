"""Steps whose directions are all computed before the first parameter moves, because they share one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.steps import CohortUpdate


@final
class Move(CohortUpdate):
    """Parameters whose state is already updated, with the changes of their means at learning rate 1.

    Args:
        params: The parameters.
        states: Their optimizer states; ``step`` already counts this update.
        group: Their parameter group.
        changes: Changes of the means, which a step may overwrite; empty if the user's optimizer updates the means.
        norm: vᵀ F v of the changes, a scalar; None if not needed.

    Attributes:
        clip_factor: Factor on the changes, from the bound on the whole step's Fisher norm.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        states: Sequence[dict[str, Any]],
        group: dict[str, Any],
        changes: Sequence[Tensor] = (),
        norm: Tensor | None = None,
    ) -> None:
        self.params, self.states, self.group, self.index = params, states, group, states[0]["step"]
        self.norm, self.clip_factor = norm, 1.0
        self._changes = list(changes)

    def prior_weights(self) -> float:
        """δ̃; see `CohortUpdate`."""
        return effective(self.group).stated_prior

    def move_(self) -> None:
        """Add the changes to the means; see `CohortUpdate`."""
        torch._foreach_add_(list[Tensor](self.params), self.propose_(float(self.group["lr"])))

    def propose_(self, lr: float) -> list[Tensor]:
        """Return the changes at a learning rate; see `CohortUpdate`."""
        torch._foreach_mul_(self._changes, lr * self.clip_factor)
        return self._changes

    def average_(self) -> None:
        """Do nothing, because the curvature is already updated; see `CohortUpdate`."""
