"""Slow truths that tests compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

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


def mean_squares(model: nn.Module, losses: Iterable[Tensor]) -> dict[str, Tensor]:
    """Mean squared gradient by a loop of autograd calls, one loss each, of the parameters that the losses depend on."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    grads = [torch.autograd.grad(x, list(params.values()), allow_unused=True, retain_graph=True) for x in losses]
    of_each = dict(zip(params, zip(*grads, strict=True), strict=True))
    return {name: torch.stack(each).square().mean(0) for name, each in of_each.items() if each[0] is not None}


def assert_stores(optimizer: Any, model: nn.Module, losses: Iterable[Tensor]) -> None:
    """The stored curvature after one update is the mean squared gradient of the losses at the same weights."""
    for name, expected in mean_squares(model, losses).items():
        found = optimizer.state[model.get_parameter(name)]["curvature"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Largest relative error over parameters: |found - truth|_2 / |truth|_2."""
    assert found.keys() == truth.keys()
    return max(float((found[k] - truth[k]).norm() / truth[k].norm().clamp_min(1e-30)) for k in truth)


def assert_measures(measured, model: nn.Module, examples: list, loss: Callable, tolerance: float) -> None:
    """Gradient and mean squared gradient are those of the loop, within a relative error."""
    grad, square = one_example_at_a_time(model, examples, loss)
    assert relative_error(measured.grad, grad) < tolerance
    assert relative_error(measured.curvature, square) < tolerance


def terms_of_the_batch(model: nn.Module, loss: Callable[[], Tensor], batch: int) -> dict[str, Tensor]:
    """Example i's term of the gradient of a whole batch, by giving each example parameters of its own.

    Also true where the model normalises over the batch, and examples have no gradient of their own. Changes the model.

    Args:
        model: A model whose parameters lie in layers that take one input, ``[batch, ...]``.
        loss: Computes the loss.
        batch: Number of examples.

    Returns:
        Terms by parameter name, ``[batch, *shape]``; their sum is the gradient of the loss.
    """
    own = {p: [p.detach().clone().requires_grad_() for _ in range(batch)] for p in model.parameters()}
    for module in model.modules():
        if any(p is not None for p in module._parameters.values()):
            module.forward = partial(_with_own_parameters, module, own)
    named = {name: own[p] for name, p in model.named_parameters() if p.requires_grad}
    grads = iter(torch.autograd.grad(loss(), [copy for copies in named.values() for copy in copies]))
    return {name: torch.stack([next(grads) for _ in copies]) for name, copies in named.items()}


def _with_own_parameters(module: nn.Module, own: dict[nn.Parameter, list[Tensor]], x: Tensor) -> Tensor:
    names = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
        x = nn.functional.batch_norm(x, None, None, training=True, eps=module.eps)
        weight, bias = (torch.stack(own[names[name]]) for name in ("weight", "bias"))
        places = (*weight.shape, *[1] * (x.dim() - 2))
        return weight.reshape(places) * x + bias.reshape(places)
    own_forward = type(module).forward
    outputs = []
    for i, one in enumerate(x):
        with torch.nn.utils.stateless._reparametrize_module(module, {name: own[p][i] for name, p in names.items()}):
            outputs.append(own_forward(module, one[None]))
    return torch.cat(outputs)
