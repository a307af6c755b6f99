"""Steps of the posterior mean: the interface, the natural step of the papers, and a trust region around it.

`optim.base_optimizer` has the step of the user's optimizer.

The trust region is the default for algorithms without noise if no learning rate is given.

**A heuristic**, tested on eleven small problems and not from a paper. Natural steps have no fixed length, so a learning rate
tuned for Adam does not apply to them. This rule computes the step d of the algorithm's own update at the fixed rate a, and
bounds its root mean square, tensor by tensor, by the step of the user's optimizer:

    s₁ = ĥ₁                                          first batch: no noise, no bias
    β₂(t) = min(β₂, (t-1)/t)                         s: running mean first, running average later
    d = update(a, β₂(t)) - μ                         a = 0.1
    μ ← μ + d · min(1, r / RMS(d))                   r = η                      Adam and its variants move by about η
                                                     r = η RMS(m̂) / (1-μ_sgd)   SGD with momentum μ_sgd; times n if
                                                                                the loss is a sum over n examples
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.posteriors import root_mean_squares

NATURAL_RATE = 0.1  # a


class CohortUpdate(ABC):
    """One update of a cohort: parameters of one group that are updated together, with their measured curvature."""

    params: Sequence[nn.Parameter]  # with ĝ in .grad
    states: Sequence[dict[str, Any]]  # of the optimizer, which count this update already
    group: dict[str, Any]
    summed: float = 1.0  # number of examples whose losses the training loss adds up; 1 for a mean

    @property
    def index(self) -> int:
        """Index of this update, from 1."""
        index: int = self.states[0]["step"]
        return index

    @abstractmethod
    def prior_weights(self) -> float | Sequence[Tensor]:
        """δ̃ of the prior that moves the means: a number, or a tensor per parameter; 0 without a stated prior."""

    @abstractmethod
    def move_(self) -> None:
        """Apply the algorithm's own update to means and state, with the group's learning rate and betas."""

    @abstractmethod
    def propose_(self, lr: float) -> list[Tensor]:
        """Update the algorithm's state, and return the changes of the means at the rate `lr`, in memory of the caller."""

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
        """The learning rate for the algorithm's proposal: that of the group, unless the step uses a fixed rate."""
        return lr

    @abstractmethod
    def apply(self, update: CohortUpdate) -> None:
        """Update one cohort."""

    def finish(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Finish the update after all cohorts."""
        return


def decay_(update: CohortUpdate) -> None:
    """Decoupled weight decay, μ ← (1 - α·wd) μ."""
    if update.group["posterior"]["decay"] in ("decoupled", "unknown") and update.group.get("weight_decay"):
        torch._foreach_mul_(list[Tensor](update.params), 1 - update.group["lr"] * update.group["weight_decay"])


@final
class NaturalStep(Step):
    """Applies the algorithm's own update with the learning rate of the group."""

    is_published = True

    @override
    def apply(self, update: CohortUpdate) -> None:
        decay_(update)
        update.move_()


@final
class TrustRegionStep(Step):
    """Bounds the algorithm's own update by the step of the user's Adam or SGD."""

    @override
    def rate(self, lr: float) -> float:
        return NATURAL_RATE

    @override
    def apply(self, update: CohortUpdate) -> None:
        decay_(update)
        move_within_radius_(update.params, update.propose_(self.rate(update.group["lr"])), _radius(update))


def _radius(update: CohortUpdate) -> Tensor | float:
    """r: η for Adam, which moves each weight by about η; n η RMS(m̂) / (1-μ_sgd) of each tensor, ``[tensors]``, for SGD."""
    group = update.group
    lr = float(group["lr"])
    if group["posterior"]["radius"] != "sgd":
        return lr
    bias_correction = 1 - group["posterior"]["betas"][0] ** update.index
    sizes = root_mean_squares([state["momentum"] for state in update.states]) / bias_correction  # RMS(m̂)
    radii: Tensor = sizes * (update.summed * lr / (1 - group.get("momentum", 0.0)))
    return radii


def move_within_radius_(means: Sequence[Tensor], steps: Sequence[Tensor], radius: Tensor | float) -> None:
    """μ ← μ + d · min(1, r / RMS(d)) for each tensor."""
    tiny = torch.finfo(steps[0].dtype).tiny
    shortening = (radius / root_mean_squares(steps).clamp_min(tiny)).clamp_max(1.0)
    for mean, step, factor in zip(means, steps, shortening.unbind(), strict=True):
        mean.addcmul_(step, factor)
