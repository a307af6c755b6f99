"""Hooks on parameters, ``param.register_hook``, which see the gradient but no square of it."""

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
    """Refuse hooks that change a parameter's gradient, which would then not fit the curvature; others may look on.

    Args:
        units: The measured modules.

    Yields:
        Nothing.
    """
    hooked = [(unit, param) for unit in units for _, param in unit.named_parameters() if gradient_hooks(param)]
    hooks_of: list[Any] = [gradient_hooks(param) for _, param in hooked]
    own = [(hooks, dict(hooks)) for hooks in hooks_of]
    try:
        for (unit, param), (hooks, before) in zip(hooked, own, strict=True):
            name = next(name for name, p in unit.module.named_parameters(unit.name) if p is param)
            hooks.update({key: partial(_watched, name, hook) for key, hook in before.items()})
        yield
    finally:
        for hooks, before in own:
            hooks.update({key: hook for key, hook in before.items() if key in hooks})


def _watched(name: str, hook: Callable[[Tensor], Any], grad: Tensor) -> Any:
    kept = grad.clone()
    result = hook(grad)
    if not torch.allclose(kept, grad if result is None else result, rtol=0, atol=0, equal_nan=True):
        raise UnsupportedTrainingError(
            f"A hook on {name} changes its gradient, and the per-example gradients would not follow. Change the loss "
            "or the layer's output instead, or freeze the parameter with requires_grad_(False)."
        )
    return result
