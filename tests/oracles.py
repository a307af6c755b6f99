"""Slow truths that tests compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def one_example_at_a_time(
    model: nn.Module, examples: list, loss: Callable[[nn.Module, object], Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mean gradient and mean squared gradient by a loop of autograd calls, one example each."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grad = {name: torch.zeros_like(p) for name, p in params.items()}
    square = {name: torch.zeros_like(p) for name, p in params.items()}
    for example in examples:
        each = torch.autograd.grad(loss(model, example), list(params.values()), allow_unused=True)
        for name, g in zip(params, each, strict=True):
            if g is not None:
                grad[name] += g / len(examples)
                square[name] += g.square() / len(examples)
    return grad, square


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Largest relative error over parameters: |found - truth|_2 / |truth|_2."""
    assert found.keys() == truth.keys()
    return max(float((found[k] - truth[k]).norm() / truth[k].norm().clamp_min(1e-30)) for k in truth)
