"""Fused CPU kernels for the step of torch's own optimizers.

By default torch launches about ten operations per tensor on a CPU. With ``fused=True`` it takes one pass over the weights.
If the user chose neither ``fused`` nor ``foreach``, this module sets ``fused`` during the step only, so groups and
checkpoints do not change. The kernels compute the same step up to rounding.

They ignore the strides of tensors without an error (torch 2.5 to 2.15). They are therefore used only if all tensors are
contiguous.
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
    """Context manager in which `base` steps with its fused kernels, if they exist and the user has made no other choice.

    Args:
        base: An optimizer.

    Yields:
        Nothing.
    """
    groups = [group for group in base.param_groups if _can_fuse(base, group)]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def _can_fuse(base: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the user left the implementation to torch, and the fused one supports the tensors of the group."""
    is_chosen = group.get("fused") is not None or group.get("foreach") is not None
    if type(base) not in _WITH_KERNELS or is_chosen or group.get("capturable") or group.get("differentiable"):
        return False
    params = [param for param in group["params"] if param.grad is not None]
    states = [base.state.get(param, {}) for param in params]
    has_started = {state.get("momentum_buffer") is not None for state in states}
    return (
        len(has_started) < 2  # SGD's kernel initialises all momenta at once
        and not isinstance(group["lr"], Tensor)
        and all(map(_is_plain, params, states))
    )


def _is_plain(param: nn.Parameter, state: Mapping[str, Any]) -> bool:
    """Whether parameter, gradient and state are contiguous tensors on the CPU."""
    grad, buffers = param.grad, [value for value in state.values() if isinstance(value, Tensor)]
    return (
        param.is_cpu
        and param.is_floating_point()
        and grad is not None
        and not grad.is_sparse
        and grad.dtype == param.dtype
        and all(tensor.is_contiguous() for tensor in (param, grad, *buffers))
    )
