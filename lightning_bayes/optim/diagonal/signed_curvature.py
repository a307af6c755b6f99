"""Curvature that may be negative: what keeps s + δ̃, and so the posterior's precision, above zero.

An update takes care of what it measures. What is left is rounding, after many moves towards zero, and a schedule that lets
δ̃ = τδ/Ñ fall below a negative s that it allowed before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bayes.optim.diagonal.mean_field import MeanFieldOptimizer
from lightning_bayes.optim.hyperparameters import effective

_LEAST_PRECISION = 1e-3  # of the prior's: no std grows past 32 times the prior's


def keep_positive(curvature: Tensor, prior: float) -> Tensor:
    """Keep s + δ̃ above a thousandth of δ̃.

    Args:
        curvature: s.
        prior: δ̃.

    Returns:
        s, or the least that is allowed.

    Example:
        >>> keep_positive(torch.tensor([-2.0, 0.5]), prior=1.0)
        tensor([-0.9990,  0.5000])
    """
    return curvature.clamp_min((_LEAST_PRECISION - 1) * prior)


class SignedCurvatureOptimizer(MeanFieldOptimizer):
    """A mean-field optimizer whose s may be negative, above -δ̃; subclasses fill in the class attributes."""

    def _count_update(self) -> None:
        before = [effective(group).prior for group in self.param_groups]
        super()._count_update()
        for group, old in zip(self.param_groups, before, strict=True):
            now = effective(group).prior
            if now < old:
                curvatures = [self.state[param]["curvature"] for param in group["params"]]
                torch._foreach_copy_(curvatures, [keep_positive(curvature, now) for curvature in curvatures])
