"""The interface of a posterior family: how the weights of an optimizer are sampled, measured and updated.

An optimizer joins a family with a curvature estimator and a step. All tensors of the posterior are in the optimizer's state,
so that checkpoints include them; a family holds only the optimizer and caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_bayes.curvature import Capture
from lightning_bayes.optim.finished_pass import UpdateMeasurement
from lightning_bayes.optim.noise import CounterNoise
from lightning_bayes.optim.steps import CohortUpdate


class PosteriorFamily(ABC):
    """A family of posteriors over the weights of one optimizer.

    Every pass draws a `sample`. A pass that measures curvature also opens a `capture`, and its estimator may read `scores`.
    `updates` follows the last pass of an update.
    """

    counters: ClassVar[Mapping[str, int]] = {}  # numbers in the state of every parameter, with their initial values

    @abstractmethod
    def state_fields(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        """Names of the tensors in a parameter's state that are shaped like it."""

    def check_groups(self) -> None:
        """Check the parameter groups after one was added; raises an error if the family does not support them."""
        return

    @abstractmethod
    def capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """The capture of a pass that measures curvature."""

    @abstractmethod
    def to_measure(self, *, always: bool = False) -> Mapping[Hashable, Tensor]:
        """What the next update measures: by key a tensor of its shape; empty if it measures nothing."""

    @abstractmethod
    def sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        """Draw a posterior sample."""

    @abstractmethod
    def scores(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ = -∇ log q(θ) of the open pass; without the parameters that have no noise or correlated noise."""

    @abstractmethod
    def updates(self, measurement: UpdateMeasurement) -> Iterable[CohortUpdate]:
        """Count the update in the states, and prepare the update of every cohort from a measurement."""

    @abstractmethod
    def start_curvature(self) -> None:
        """Before the first update, initialise the curvature of all groups that have an ``init_precision``."""

    @abstractmethod
    def refresh(self, *, measured: bool, always: bool = False) -> None:
        """Store the covariance of the parameters whose curvature has changed."""
