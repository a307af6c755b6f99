"""Steps of the posterior mean: the natural step of the papers, a trust region around it, or the user's optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.steps.base_optimizer import BaseOptimizerStep, defaults_with_base
from lightning_bayes.optim.steps.natural import NaturalStep
from lightning_bayes.optim.steps.step import CohortUpdate, Step
from lightning_bayes.optim.steps.trust_region import TrustRegionStep

__all__ = [
    "BaseOptimizerStep",
    "CohortUpdate",
    "NaturalStep",
    "Step",
    "TrustRegionStep",
    "defaults_with_base",
    "make_steps",
    "step_for",
]


def make_steps(base: torch.optim.Optimizer | None) -> dict[str, Step]:
    """The steps available to an optimizer's groups, by step rule.

    Args:
        base: Another optimizer that moves the means, if any.

    Returns:
        ``"user"`` alone with a base optimizer, otherwise ``"natural"`` and ``"trust_region"``.
    """
    if base is None:
        return {"natural": NaturalStep(), "trust_region": TrustRegionStep()}
    return {"user": BaseOptimizerStep(base)}


def step_for(step_rule: str, steps: Mapping[str, Step]) -> Step:
    """The step of a rule.

    Args:
        step_rule: The rule.
        steps: The result of `make_steps`.

    Returns:
        The step.

    Raises:
        HyperparameterError: If the rule is ``"user"`` without a base optimizer, or another rule with one.
    """
    if step_rule not in steps:
        base = steps.get("user")
        name = type(base.base).__name__ if isinstance(base, BaseOptimizerStep) else None
        raise HyperparameterError(
            f"step_rule={step_rule!r} and base={name} do not match: step_rule='user' requires a base optimizer, and no "
            "other rule allows one. Pass that optimizer as base=..., or leave both out."
        )
    return steps[step_rule]
