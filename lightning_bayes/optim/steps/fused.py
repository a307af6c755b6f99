"""The step of torch's own optimizers by their fused kernels on a CPU.

There torch starts about ten operations for every tensor unless it is asked for ``fused=True``, which takes one pass over the
weights. It is asked for during the step only, where neither ``fused`` nor ``foreach`` was chosen: groups and checkpoints
stay the user's. The kernels do the same arithmetic in another order of rounding.

They read tensors by their address, whatever the strides, and say nothing where these differ (torch 2.5 to 2.15). So every
tensor has to be contiguous; otherwise the optimizer steps as torch does by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_WITH_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@contextmanager
def fused_on_cpu(base: torch.optim.Optimizer) -> Iterator[None]:
    """Let `base` step by its fused kernels inside the context, where it has them and nothing was chosen.

    Args:
        base: An optimizer.

    Yields:
        Nothing.
    """
    groups = [group for group in base.param_groups if _is_open(base, group)]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def _is_open(base: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether torch would choose an implementation for the group, and the fused one can take its tensors."""
    is_chosen = group.get("fused") is not None or group.get("foreach") is not None
    if type(base) not in _WITH_KERNELS or is_chosen or group.get("capturable") or group.get("differentiable"):
        return False
    params = [param for param in group["params"] if param.grad is not None]
    states = [base.state.get(param, {}) for param in params]
    has_started = {state.get("momentum_buffer") is not None for state in states}
    return (
        len(has_started) < 2  # SGD's kernel starts the momentum of all at once
        and not isinstance(group["lr"], Tensor)
        and all(map(_is_plain, params, states))
    )


def _is_plain(param: nn.Parameter, state: Mapping[str, Any]) -> bool:
    """Whether parameter, gradient and state lie in a CPU's memory alike."""
    grad, kept = param.grad, [value for value in state.values() if isinstance(value, Tensor)]
    return (
        type(param) is nn.Parameter  # not FSDP2's
        and param.is_cpu
        and param.is_floating_point()
        and grad is not None
        and not grad.is_sparse
        and grad.dtype == param.dtype
        and all(tensor.is_contiguous() for tensor in (param, grad, *kept))
    )
