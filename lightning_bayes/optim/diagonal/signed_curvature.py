"""A lower bound for curvature of either sign, which keeps s + δ̃ and thus the posterior precision positive.

The updates themselves keep s + δ̃ positive. The bound covers rounding, after many steps towards zero, and schedules that
lower δ̃ = τδ/Ñ until a negative s no longer exceeds -δ̃.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_bayes.optim.weight_prior import prior_of

_MIN_PRECISION = 1e-3  # relative to the prior's; bounds standard deviations by 32 times the prior's


def keep_positive(curvature: Tensor, prior: float | Tensor) -> Tensor:
    """Clamp s so that s + δ̃ is at least a thousandth of δ̃."""
    return curvature.clamp_min((_MIN_PRECISION - 1) * prior)


def keep_positive_(curvature: Tensor, prior: float | Tensor) -> Tensor:
    """`keep_positive` in place."""
    return curvature.clamp_min_((_MIN_PRECISION - 1) * prior)


def keep_all_positive_(states: Mapping[Tensor, Mapping[str, Any]], group: Mapping[str, Any]) -> None:
    """Apply `keep_positive` in place to the curvatures in the optimizer states of a parameter group."""
    for state in (states[param] for param in group["params"]):
        if "curvature" in state:
            keep_positive_(state["curvature"], prior_of(group, state))
