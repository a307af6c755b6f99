"""The interface of a step, which moves the posterior mean after the measurement of an update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class CohortUpdate(ABC):
    """One update of a cohort: parameters of one group that are updated together, with their measured curvature.

    Attributes:
        params: The parameters, with ĝ in ``.grad``.
        states: Their optimizer states, which count this update already.
        group: Their parameter group.
        index: Index of this update, from 1.
    """

    params: Sequence[nn.Parameter]
    states: Sequence[dict[str, Any]]
    group: dict[str, Any]
    index: int

    @abstractmethod
    def prior_weights(self) -> float | Sequence[Tensor]:
        """δ̃ for the gradient of another optimizer: a number, or a tensor per parameter; 0 without a stated prior."""

    @abstractmethod
    def move_(self) -> None:
        """Apply the algorithm's own update to means and state, with the group's learning rate and betas."""

    @abstractmethod
    def propose_(self, lr: float) -> list[Tensor]:
        """Update the algorithm's state but not the means.

        Args:
            lr: The learning rate of the proposal.

        Returns:
            The proposed changes of the means. The caller may overwrite them.
        """

    @abstractmethod
    def average_(self) -> None:
        """Update the curvature alone."""


class Step(ABC):
    """How the means move: the third factor of a method, next to posterior and curvature.

    An optimizer calls `apply` for each cohort, in any order, and then `finish` once. `apply` updates the algorithm's state
    (s, m and so on) and the means of the cohort. If another optimizer moves the means, `apply` leaves their gradients in
    ``param.grad`` for `finish`. K-FAC bounds the Fisher norm of the whole step, so it computes all directions before the
    first parameter moves, and then applies updates that propose the bounded ones (`optim.kronecker.moves`). A step itself
    holds no state of the algorithm.

    Class attributes:
        uses_natural_update: Whether the algorithm's update moves the means. If not, momentum and inverses are not needed.
        is_published: Whether this is the step of the papers. The others are heuristics: their running averages start at the
            first measurement instead of an initial state, and normalisation layers have no noise by default.
    """

    uses_natural_update: ClassVar[bool] = True
    is_published: ClassVar[bool] = False

    def rate(self, lr: float) -> float:
        """The learning rate for the algorithm's proposal.

        Args:
            lr: Learning rate of the group.

        Returns:
            `lr`, unless the step uses a fixed rate.
        """
        return lr

    @abstractmethod
    def apply(self, update: CohortUpdate) -> None:
        """Update one cohort.

        Args:
            update: Its update.
        """

    def finish(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Finish the update after all cohorts.

        Args:
            groups: The optimizer's parameter groups.
            states: Its state.
        """
        return


def decay_(update: CohortUpdate) -> None:
    """Decoupled weight decay, μ ← (1 - α·wd) μ."""
    if update.group["posterior"]["decay"] in ("decoupled", "unknown") and update.group.get("weight_decay"):
        torch._foreach_mul_(list[Tensor](update.params), 1 - update.group["lr"] * update.group["weight_decay"])
