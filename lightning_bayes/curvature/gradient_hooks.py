"""Checks of users' gradient hooks (``param.register_hook``), which see the mean gradient but not the squares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.private_torch import gradient_hooks


@contextmanager
def changes_refused(units: Iterable[MeasuredModule]) -> Iterator[None]:
    """Raise an error if a hook on a measured parameter changes the gradient, which would no longer match the curvature."""
    hooked = [(unit, param) for unit in units for _, param in unit.named_parameters() if gradient_hooks(param)]
    hooks_of: list[Any] = [gradient_hooks(param) for _, param in hooked]
    originals = [(hooks, dict(hooks)) for hooks in hooks_of]
    try:
        for (unit, param), (hooks, original) in zip(hooked, originals, strict=True):
            name = next(name for name, p in unit.module.named_parameters(unit.name) if p is param)
            hooks.update({key: partial(_checked, name, hook) for key, hook in original.items()})
        yield
    finally:
        for hooks, original in originals:
            hooks.update({key: hook for key, hook in original.items() if key in hooks})


def _checked(name: str, hook: Callable[[Tensor], Any], grad: Tensor) -> Any:
    before = grad.clone()
    result = hook(grad)
    if not torch.allclose(before, grad if result is None else result, rtol=0, atol=0, equal_nan=True):
        raise UnsupportedTrainingError(
            f"A hook on {name} changes its gradient, but it cannot change the per-example gradients. Change the loss or "
            "the layer's output instead, or freeze the parameter with requires_grad_(False)."
        )
    return result
