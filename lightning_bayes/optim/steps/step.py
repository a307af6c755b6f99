"""The interface of a step, which moves the posterior mean once an algorithm has its measurement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Cohort(ABC):
    """Parameters of one group that are updated together, with their algorithm's update at the open measurement.

    Attributes:
        params: The parameters; ``.grad`` is ĝ.
        states: Their optimizer states.
        group: Their parameter group.
        prior: δ̃, weight of the prior's gradient in the algorithm.
        number: Number of this update, from 1.
        measurements: Number of measurements in the curvature, this one included. Updates between two measurements count
            as such, see `optim.runtime.measuring`.
        since: e, updates for which this measurement stands; 0 where the update measures nothing.
        prior_means: μ₀ of each parameter; empty for zero.
    """

    params: Sequence[nn.Parameter]
    states: Sequence[dict[str, Any]]
    group: Mapping[str, Any]
    prior: float
    number: int
    measurements: int
    since: int = 1
    prior_means: Sequence[Tensor]

    def prior_weights(self) -> float | Sequence[Tensor]:
        """δ̃ in the gradient of another optimizer's step, or δ̃ of each parameter's weights; 0 where no prior is stated."""
        return self.prior * float(self.group["prior_on_mean"])

    @abstractmethod
    def move_(self) -> None:
        """Take the algorithm's own update, of the means and of its state, at the group's learning rate and betas."""

    @abstractmethod
    def propose_(self, lr: float, weight_of_old: float) -> list[Tensor]:
        """Update the algorithm's state, but leave the means.

        Args:
            lr: The learning rate of the proposal.
            weight_of_old: β₂ of this update.

        Returns:
            The changes of the means that the update would make, in memory that the step may overwrite.
        """

    @abstractmethod
    def average_(self, weight_of_old: float) -> None:
        """Update the curvature alone.

        Args:
            weight_of_old: β₂ of this update.
        """


class Step(ABC):
    """How the means of cohorts move; the third factor of a method, beside posterior and curvature.

    For each cohort an optimizer calls `apply`, in any order, and then `finish` once. `apply` updates everything that belongs
    to the cohort's parameters: the algorithm's state (s, m, and what else it keeps) and the means; a step for which another
    optimizer moves the means leaves their gradients in ``param.grad`` for `finish`. An optimizer that needs all directions
    before it moves the first parameter, such as K-FAC with a bound of the step's Fisher norm, computes them at `rate` and
    `weight_of_old`, and then hands over cohorts that propose the bounded ones. A step keeps no state of its own.

    Class attributes:
        uses_update: Whether the algorithm's update moves the means. Otherwise its momentum and inverses are not needed.
        is_published: Whether it is the papers' step. The others are heuristics: their running averages start with the first
            measurement, not with an initial state, and normalisation layers have no noise unless they are asked for.
    """

    uses_update: ClassVar[bool] = True
    is_published: ClassVar[bool] = False

    def rate(self, lr: float) -> float:
        """The learning rate at which the algorithm proposes.

        Args:
            lr: The group's learning rate.

        Returns:
            `lr`, unless the step has a rate of its own.
        """
        return lr

    def weight_of_old(self, beta: float, measurements: int, since: int = 1) -> float:
        """β₂(t), the weight of the old curvature; unless the step is the papers', a running mean first.

        Args:
            beta: β₂.
            measurements: t, number of measurements, this one included.
            since: e, the last of them that this one stands for; see `optim.runtime.measuring`.

        Returns:
            β₂(t); 1 for e = 0.
        """
        if self.is_published:
            return beta**since
        return prod(min(beta, (t - 1) / t) for t in range(measurements - since + 1, measurements + 1))

    @abstractmethod
    def apply(self, cohort: Cohort) -> None:
        """Update one cohort.

        Args:
            cohort: The cohort.
        """

    def finish(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """End the update, after all cohorts.

        Args:
            groups: The optimizer's parameter groups.
            states: Its state.
        """
        return

    def add_group(self, group: Mapping[str, Any], count: int) -> None:
        """Take a new parameter group.

        Args:
            group: The group.
            count: Number of the optimizer's groups, this one included.
        """
        return


def decay_(cohort: Cohort) -> None:
    """μ ← (1 - α·wd) μ, decoupled weight decay."""
    if cohort.group["weight_decay"]:
        torch._foreach_mul_(list[Tensor](cohort.params), 1 - cohort.group["lr"] * cohort.group["weight_decay"])
