"""A trust region around the natural step: the default of algorithms without noise where no learning rate is given.

**A heuristic**, measured on eleven small problems, not from a paper. A natural step has no fixed length, so a learning
rate tuned for Adam means nothing to it. This rule takes the step d that the algorithm's own update would take at the
fixed rate a, and bounds its root mean square, tensor by tensor, by the step of the user's own optimizer:

    s₁ = ĥ₁                                          first batch: no noise, no bias
    β₂(t) = min(β₂, (t-1)/t)                         s: running mean first, running average later
    d = update(a, β₂(t)) - μ                         a = 0.1
    μ ← μ + d · min(1, r / RMS(d))                   r = η                      Adam and its kin move by about η
                                                     r = η RMS(m̂) / (1-μ_sgd)   SGD with momentum μ_sgd
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from lightning_bayes.optim.steps.step import Cohort, Step, decay_
from lightning_bayes.posteriors import root_mean_squares

NATURAL_RATE = 0.1  # a


@final
class TrustRegionStep(Step):
    """Bounds the algorithm's own update by the step of the user's Adam or SGD."""

    def rate(self, lr: float) -> float:
        """The fixed rate a; see `Step`."""
        return NATURAL_RATE

    def apply(self, cohort: Cohort) -> None:
        """Update one cohort; see `Step`."""
        decay_(cohort)
        weight = self.weight_of_old(cohort.group["betas"][1], cohort.measurements, cohort.since)
        bounded_step_(cohort.params, cohort.propose_(self.rate(cohort.group["lr"]), weight), _radius(cohort))


def _radius(cohort: Cohort) -> Tensor | float:
    group = cohort.group
    if group["radius"] != "sgd":
        return adam_radius(float(group["lr"]))
    sizes = root_mean_squares([state["momentum"] for state in cohort.states]) / (1 - group["betas"][0] ** cohort.number)
    return sgd_radius(float(group["lr"]), group["momentum"], sizes)


def adam_radius(lr: float) -> float:
    """Return r for a user's Adam: each weight moves by about its learning rate."""
    return lr


def sgd_radius(lr: float, momentum: float, debiased_momentum_size: Tensor) -> Tensor:
    """Return r for a user's SGD with momentum μ_sgd, whose steps add up to η m̂ / (1-μ_sgd).

    Args:
        lr: η.
        momentum: μ_sgd.
        debiased_momentum_size: RMS(m̂) of each tensor, ``[tensors]``.

    Returns:
        One for each tensor, ``[tensors]``.
    """
    return debiased_momentum_size * (lr / (1 - momentum))


def bounded_step_(means: Sequence[Tensor], steps: Sequence[Tensor], radius: Tensor | float) -> None:
    """μ ← μ + d · min(1, r / RMS(d)) for each tensor.

    Args:
        means: μ, changed.
        steps: d, shaped like the means.
        radius: r, one for all or ``[tensors]``.
    """
    tiny = torch.finfo(steps[0].dtype).tiny
    shortening = (radius / root_mean_squares(steps).clamp_min(tiny)).clamp_max(1.0)
    for mean, step, factor in zip(means, steps, shortening.unbind(), strict=True):
        mean.addcmul_(step, factor)
