"""The covariance of independent weights, stored in each parameter's state beside its curvature s.

    1/Σ = scale · (max(s, floor) + damping)        scale = Ñ/τ_t, damping = γ_t, the prior's δ̃ included

Sampling, posteriors, checkpoints and `effective_parameters` read these numbers and nothing else. `refresh` derives them from
the hyperparameters whenever s has changed: `posteriors.shaped_noise` has the equations of a ``relative_noise``; the noise of
the bound has scale Ñ/τ and damping δ̃ + γ. Negative s count as 0 in shaped noise; the bound's s + δ̃ is positive by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.measuring import SHAPE_INTERVAL
from lightning_bayes.posteriors import noise_shapes

_NO_FLOOR = -3e38  # every float32 is above
NO_NOISE = 1e24  # damping of weights without noise: a standard deviation that no sum in float32 notices


def is_noisy(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether a parameter is sampled."""
    return bool(group["posterior"]["noisy"] and state.get("noisy"))


def is_refreshed(step: int, elapsed: int, *, shaped: bool) -> bool:
    """Whether an update refreshes scale and damping."""
    return not shaped or step <= SHAPE_INTERVAL or step // SHAPE_INTERVAL > (step - elapsed) // SHAPE_INTERVAL


def refresh(group: Mapping[str, Any], params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
    """Store scale, damping and floor of parameters with a curvature in their states; `params` hold μ."""
    hyper = effective(group)
    stated = [hyper.noise_damping if "prior_precision" in state else hyper.stated_damping for state in states]
    floor, scales = _NO_FLOOR, [hyper.scale] * len(states)
    dampings = [hyper.noise_damping + (0.0 if "prior_precision" in state else hyper.prior) for state in states]
    if hyper.relative_noise is not None:
        pairs = [_counted(hyper, param.detach(), state) for param, state in zip(params, states, strict=True)]
        curvatures, means = zip(*pairs, strict=True)
        initial_rms, flatness = [state["initial_rms"] for state in states], hyper.noise_flatness
        shape = noise_shapes(curvatures, means, initial_rms, hyper.relative_noise, hyper.scale, stated, flatness)
        floor, scales, dampings = 0.0, shape.scale.tolist(), shape.damping.tolist()
    for state, scale, damping in zip(states, scales, dampings, strict=True):
        is_own = "prior_precision" in state or "rows_without_noise" in state
        state.update(scale=scale, floor=floor, damping=_of_weights(hyper, state, damping) if is_own else damping)


def precisions(states: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """1/Σ of each parameter, in new memory."""
    curvatures = [state["curvature"] for state in states]
    values = list(torch._foreach_clamp_min(curvatures, [state["floor"] for state in states]))
    dampings = [state["damping"] for state in states]
    if any(isinstance(damping, Tensor) for damping in dampings):
        for value, damping in zip(values, dampings, strict=True):
            value.add_(damping)
    else:
        torch._foreach_add_(values, dampings)
    torch._foreach_mul_(values, [state["scale"] for state in states])
    return values


def sample(
    means: Sequence[Tensor], states: Sequence[Mapping[str, Any]], draws: Sequence[Tensor], sign: int
) -> list[Tensor]:
    """θ = μ ± ε √Σ, in new memory with the strides of the draws."""
    if not draws[0].is_cpu:  # few kernels
        deviations = precisions(states)
        torch._foreach_sqrt_(deviations)
        return list(torch._foreach_addcdiv(list(means), list(draws), deviations, value=sign))
    values = [torch.empty_like(draw) for draw in draws]
    for value, mean, state, draw in zip(
        values, means, states, draws, strict=True
    ):  # new pages cost more than arithmetic
        torch.clamp_min(state["curvature"], state["floor"], out=value)
        torch.addcdiv(mean, draw, value.add_(state["damping"]).mul_(state["scale"]).sqrt_(), value=sign, out=value)
    return values


def _of_weights(hyper: Effective, state: Mapping[str, Any], damping: float) -> Tensor:
    """The damping of each weight: with its own δ̃, and without noise in the rows that get no gradient."""
    precision, rows = state.get("prior_precision"), state.get("rows_without_noise")
    total: float | Tensor = damping if precision is None else hyper.prior_of(precision).add_(damping)
    weights = torch.zeros_like(state["curvature"]).add_(total)
    if rows is not None:
        weights[rows] = NO_NOISE
    return weights


def _counted(hyper: Effective, mean: Tensor, state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The s and μ of the noise scale: a prior of each weight counts as curvature, rows without noise do not count."""
    curvature, precision = state["curvature"], state.get("prior_precision")
    if precision is not None:
        curvature = curvature + hyper.prior_of(precision)
    if "rows_without_noise" in state:
        kept = torch.ones(len(mean), dtype=torch.bool, device=mean.device)
        kept[state["rows_without_noise"]] = False
        mean, curvature = mean[kept], curvature[kept]
    return curvature, mean
