"""Cohorts of K-FAC: changes that are computed for the whole model before the first parameter moves."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.diagonal.cohort import prior_means
from lightning_bayes.optim.hyperparameters import effective
from lightning_bayes.optim.steps import Cohort


@final
class ComputedCohort(Cohort):
    """Parameters whose curvature is updated and whose changes are computed, at the learning rate 1.

    Args:
        params: The parameters.
        states: Their optimizer states, which count this update already.
        group: Their parameter group.
        changes: The changes of the means; empty where another optimizer moves them.
        share: Factor that the bound of the step's Fisher norm leaves of them.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        states: list[dict[str, Any]],
        group: dict[str, Any],
        changes: list[Tensor],
        share: float = 1.0,
    ) -> None:
        self.params, self.states, self.group, self.prior = params, states, group, effective(group).prior
        self.number, self.measurements = states[0]["step"], states[0]["measurements"]
        self.prior_means = prior_means(states)
        self._changes, self._share = changes, share

    def move_(self) -> None:
        """Add the changes to the means; see `Cohort`."""
        torch._foreach_add_(list[Tensor](self.params), self.propose_(float(self.group["lr"]), 0.0))

    def propose_(self, lr: float, weight_of_old: float) -> list[Tensor]:
        """The changes; see `Cohort`."""
        torch._foreach_mul_(self._changes, lr * self._share)
        return self._changes

    def average_(self, weight_of_old: float) -> None:
        """Nothing: the curvature is updated; see `Cohort`."""
