"""Curvature that may be negative: what keeps s + δ̃, and so the posterior's precision, above zero.

An update takes care of what it measures. What is left is rounding, after many moves towards zero, and a schedule that lets
δ̃ = τδ/Ñ fall below a negative s that it allowed before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_bayes.optim.weight_prior import prior_of

_LEAST_PRECISION = 1e-3  # of the prior's: no std grows past 32 times the prior's


def keep_positive(curvature: Tensor, prior: float | Tensor) -> Tensor:
    """Keep s + δ̃ above a thousandth of δ̃.

    Args:
        curvature: s.
        prior: δ̃.

    Returns:
        s, or the least that is allowed.

    Example:
        >>> import torch
        >>> keep_positive(torch.tensor([-2.0, 0.5]), prior=1.0)
        tensor([-0.9990,  0.5000])
    """
    return curvature.clamp_min((_LEAST_PRECISION - 1) * prior)


def keep_all_positive_(states: Iterable[Mapping[str, Any]], group: Mapping[str, Any]) -> None:
    """`keep_positive` in place.

    Args:
        states: Optimizer states; those without a curvature stay.
        group: Their parameter group.
    """
    for state in (state for state in states if "curvature" in state):
        state["curvature"].copy_(keep_positive(state["curvature"], prior_of(group, state)))
