"""A trust region around the natural step: the default for algorithms without noise if no learning rate is given.

**A heuristic**, tested on eleven small problems and not from a paper. Natural steps have no fixed length, so a learning rate
tuned for Adam does not apply to them. This rule computes the step d of the algorithm's own update at the fixed rate a, and
bounds its root mean square, tensor by tensor, by the step of the user's optimizer:

    s₁ = ĥ₁                                          first batch: no noise, no bias
    β₂(t) = min(β₂, (t-1)/t)                         s: running mean first, running average later
    d = update(a, β₂(t)) - μ                         a = 0.1
    μ ← μ + d · min(1, r / RMS(d))                   r = η                      Adam and its variants move by about η
                                                     r = η RMS(m̂) / (1-μ_sgd)   SGD with momentum μ_sgd
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lightning_bayes.optim.steps.step import CohortUpdate, Step, decay_
from lightning_bayes.posteriors import root_mean_squares

NATURAL_RATE = 0.1  # a


@final
class TrustRegionStep(Step):
    """Bounds the algorithm's own update by the step of the user's Adam or SGD."""

    def rate(self, lr: float) -> float:
        """The fixed rate a; see `Step`."""
        return NATURAL_RATE

    def apply(self, update: CohortUpdate) -> None:
        """Update one cohort; see `Step`."""
        decay_(update)
        move_within_radius_(update.params, update.propose_(self.rate(update.group["lr"])), _radius(update))


def _radius(update: CohortUpdate) -> Tensor | float:
    """r: η for Adam, which moves each weight by about η; η RMS(m̂) / (1-μ_sgd) of each tensor, ``[tensors]``, for SGD."""
    group = update.group
    lr = float(group["lr"])
    if group["posterior"]["radius"] != "sgd":
        return lr
    bias_correction = 1 - group["posterior"]["betas"][0] ** update.index
    sizes = root_mean_squares([state["momentum"] for state in update.states]) / bias_correction  # RMS(m̂)
    radii: Tensor = sizes * (lr / (1 - group.get("momentum", 0.0)))
    return radii


def move_within_radius_(means: Sequence[Tensor], steps: Sequence[Tensor], radius: Tensor | float) -> None:
    """μ ← μ + d · min(1, r / RMS(d)) for each tensor."""
    tiny = torch.finfo(steps[0].dtype).tiny
    shortening = (radius / root_mean_squares(steps).clamp_min(tiny)).clamp_max(1.0)
    for mean, step, factor in zip(means, steps, shortening.unbind(), strict=True):
        mean.addcmul_(step, factor)
