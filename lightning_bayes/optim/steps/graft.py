"""Grafting: the direction of the natural gradient, the length of the user's own step, tensor by tensor.

    d_t = m_t / (max(s_t, 0) + γ_t)             γ_t = mean_j max(s_j, 0)
    Δμ_t = -d_t · RMS(Δ_t) / RMS(d_t)           Δ_t: the user's step

m is the momentum of the user's optimizer (``exp_avg`` or ``momentum_buffer`` in its state), or the gradient if there is
none. Its scale does not matter. Without any curvature d_t is m_t. A tensor with d_t = 0 does not move. Decoupled weight
decay acts separately, as in the user's training. After Agarwal et al. 2020 (https://arxiv.org/abs/2002.11803). **A
heuristic**: neither γ_t nor the length follows from the variational bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bayes.optim.runtime.blocks import Block, blocks

_MOMENTA = ("exp_avg", "momentum_buffer")  # names in the states of torch's optimizers


class Steps(NamedTuple):
    """Steps of tensors on one device and of one dtype."""

    ends: list[Tensor]  # after the step of the user's optimizer; changed in place
    starts: list[Tensor]  # before it, after decoupled weight decay
    curvatures: list[Tensor]  # s
    momenta: list[Tensor]  # m


def graft_(
    groups: Sequence[Mapping[str, Any]],
    starts: Mapping[Tensor, Tensor],
    states: Mapping[Tensor, Mapping[str, Any]],
    base_states: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Turn the steps of the user's optimizer into the natural direction.

    Args:
        groups: Groups of the noisy optimizer, with the decoupled ``weight_decay``.
        starts: Values before the step, by parameter; overwritten.
        states: States of the noisy optimizer, with the ``curvature``. A tensor without one keeps the user's step.
        base_states: States of the user's optimizer, with its momentum.
    """
    steps_by_kind: dict[Any, Steps] = {}
    for group in groups:
        params = [param for param in group["params"] if param in starts and "curvature" in states[param]]
        if decay := float(group["lr"]) * float(group["weight_decay"]):
            torch._foreach_mul_([starts[param] for param in params], 1 - decay)
        for param in params:
            steps = steps_by_kind.setdefault((param.device, param.dtype), Steps([], [], [], []))
            steps.ends.append(param.detach())
            steps.starts.append(starts[param])
            steps.curvatures.append(states[param]["curvature"])
            steps.momenta.append(_momentum(param, base_states))
    for steps in steps_by_kind.values():
        turn_(steps)


def turn_(steps: Steps) -> None:
    """Give each step the natural direction, block by block.

    Args:
        steps: The steps. Their ends are changed in place.

    Example:
        >>> import torch
        >>> end = torch.tensor([-0.1, -0.1])
        >>> turn_(Steps([end], [torch.zeros(2)], [torch.tensor([0.0, 2.0])], [torch.ones(2)]))  # γ = 1
        >>> end  # in the ratio 3 to 1, with the same length as before
        tensor([-0.1342, -0.0447])
    """
    cover = list(blocks(steps.ends))
    counts = torch.tensor([end.numel() for end in steps.ends], device=steps.ends[0].device)
    means = _sums(cover, 1, lambda block: _positive(steps, block)) / counts
    dampings = torch.where(means > 0, means, torch.ones_like(means)).unbind()
    lengths = _sums(cover, 2, lambda block: torch._foreach_sub(block.parts(steps.ends), block.parts(steps.starts)))
    sizes = _sums(cover, 2, lambda block: _put_directions_(steps, dampings, block))
    factors = torch.where(sizes > 0, (lengths / sizes).sqrt().neg(), torch.zeros_like(sizes)).unbind()
    for block in cover:
        ends = block.parts(steps.ends)
        torch._foreach_mul_(ends, list(factors[block.first : block.last]))
        torch._foreach_add_(ends, block.parts(steps.starts))


def _momentum(param: Tensor, base_states: Mapping[Tensor, Mapping[str, Any]]) -> Tensor:
    buffers = (base_states[param].get(name) for name in _MOMENTA) if param in base_states else ()
    momentum = next((buffer for buffer in buffers if buffer is not None), param.grad)
    assert momentum is not None  # the parameter has just been moved
    return momentum


def _positive(steps: Steps, block: Block) -> list[Tensor]:
    return list(torch._foreach_clamp_min(block.parts(steps.curvatures), 0))


def _put_directions_(steps: Steps, dampings: Sequence[Tensor], block: Block) -> list[Tensor]:
    """Overwrite the ends of a block's tensors with the natural directions, and return them."""
    strengths, ends = _positive(steps, block), block.parts(steps.ends)
    torch._foreach_add_(strengths, list(dampings[block.first : block.last]))
    torch._foreach_copy_(ends, block.parts(steps.momenta))
    torch._foreach_div_(ends, strengths)
    return ends


def _sums(cover: Sequence[Block], power: int, numbers: Callable[[Block], Sequence[Tensor]]) -> Tensor:
    """The sum of |numbers|^power over each tensor, ``[tensors]``."""
    owners = [i for block in cover for i in range(block.first, block.last)]
    norms = [norm for block in cover for norm in torch._foreach_norm(list(numbers(block)), power)]
    sums = torch.stack(norms).pow(power)
    return sums.new_zeros(owners[-1] + 1).index_add_(0, torch.tensor(owners, device=sums.device), sums)
