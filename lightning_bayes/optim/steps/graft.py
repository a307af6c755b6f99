"""Grafting: the direction of the natural gradient, the length of the user's own step, tensor by tensor.

    d_t = m_t / (max(s_t, 0) + γ_t)             γ_t = mean_j max(s_j, 0)
    Δμ_t = -d_t · RMS(Δ_t) / RMS(d_t)           Δ_t: the user's step

m is the momentum of the user's optimizer (``exp_avg`` or ``momentum_buffer`` of its state), else the gradient. Its scale
does not matter. Decoupled weight decay acts beside it, as in the user's training. After Agarwal et al. 2020
(https://arxiv.org/abs/2002.11803). **A heuristic**: neither γ_t nor the length follows from the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.posteriors import root_mean_squares

_MOMENTA = ("exp_avg", "momentum_buffer")  # of torch's optimizers


def graft_(
    groups: Sequence[Mapping[str, Any]],
    starts: Mapping[Tensor, Tensor],
    states: Mapping[Tensor, Mapping[str, Any]],
    base_states: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Turn the steps that the user's optimizer took.

    Args:
        groups: The noisy optimizer's groups, with the ``weight_decay`` of a decoupled decay.
        starts: Parameters before the step, by parameter; these are moved.
        states: The noisy optimizer's, with each tensor's ``curvature``; a tensor without keeps the user's step.
        base_states: The user's optimizer's, with its momentum.
    """
    for group in groups:
        kept = 1 - float(group["lr"]) * float(group["weight_decay"])
        for param in group["params"]:
            if param in starts and "curvature" in states[param]:
                _turn_(param.detach(), starts[param] * kept, states[param]["curvature"], _momentum(param, base_states))


def natural_direction(momentum: Tensor, curvature: Tensor) -> Tensor:
    """Return d = m / (max(s, 0) + γ) of one tensor; m itself where there is no curvature.

    Args:
        momentum: m.
        curvature: s, shaped like it.

    Returns:
        Shaped like it.

    Example:
        >>> import torch
        >>> natural_direction(torch.ones(2), torch.tensor([0.0, 2.0]))  # γ = 1
        tensor([1.0000, 0.3333])
    """
    positive = curvature.clamp_min(0)
    damping = positive.mean()
    return momentum / torch.where(damping > 0, positive + damping, torch.ones_like(positive))


def _momentum(param: Tensor, base_states: Mapping[Tensor, Mapping[str, Any]]) -> Tensor:
    found = (base_states[param].get(name) for name in _MOMENTA) if param in base_states else ()
    momentum = next((value for value in found if value is not None), param.grad)
    assert momentum is not None  # of parameters with a step
    return momentum


def _turn_(end: Tensor, start: Tensor, curvature: Tensor, momentum: Tensor) -> None:
    direction = natural_direction(momentum, curvature)
    length, size = root_mean_squares([end - start, direction]).unbind()
    end.copy_(torch.where(size > 0, start - direction * (length / size), end))
