"""The precision, modes and surroundings of a forward pass, for its measurement in backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction


def in_full_precision(value: Any) -> Any:
    """Convert half-precision tensors to float32: float16 underflows for squared gradients such as 1e-4²."""
    is_half = isinstance(value, Tensor) and value.dtype in {torch.float16, torch.bfloat16}
    return value.float() if is_half else value


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context manager that disables autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def in_modes(modes: Iterable[tuple[nn.Module, bool]]) -> AbstractContextManager[None]:
    """Set modules to training (True) or evaluation mode, and restore their modes on exit."""
    changed = [module for module, training in modes if module.training != training]
    return _switched(changed) if changed else nullcontext()


@contextmanager
def _switched(modules: list[nn.Module]) -> Iterator[None]:
    for module in modules:
        module.training = not module.training
    try:
        yield
    finally:
        for module in modules:
            module.training = not module.training


def compiled_modules_eager() -> AbstractContextManager[None]:
    """Run compiled modules eagerly, because code compiled without hooks would not call them. Has no effect in torch 2.5."""
    has_switch = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    switch: AbstractContextManager[None] = torch.compiler.set_stance("force_eager") if has_switch else nullcontext()
    return switch


def in_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs this segment without gradients, to repeat it in backward."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
