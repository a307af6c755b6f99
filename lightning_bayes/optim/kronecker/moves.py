"""Steps whose directions are all computed before the first parameter moves, because they share one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.steps import CohortUpdate


@final
@dataclass(eq=False)
class Move(CohortUpdate):
    """Parameters whose state is already updated, with the changes of their means at learning rate 1."""

    params: Sequence[nn.Parameter]
    states: Sequence[dict[str, Any]]
    group: dict[str, Any]
    changes: list[Tensor] = field(default_factory=list)
    norm: Tensor | None = None
    clip_factor: float = 1.0

    def __post_init__(self) -> None:
        self.index = self.states[0]["step"]

    def prior_weights(self) -> float:
        """δ̃; see `CohortUpdate`."""
        return effective(self.group).stated_prior

    def move_(self) -> None:
        """Add the changes to the means; see `CohortUpdate`."""
        torch._foreach_add_(list[Tensor](self.params), self.propose_(float(self.group["lr"])))

    def propose_(self, lr: float) -> list[Tensor]:
        """Return the changes at a learning rate; see `CohortUpdate`."""
        torch._foreach_mul_(self.changes, lr * self.clip_factor)
        return self.changes

    def average_(self) -> None:
        """Do nothing, because the curvature is already updated; see `CohortUpdate`."""
