"""Checks of a model's trainable parameters, and of users' hooks on their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_bayes.curvature.measured_modules import MeasuredModule
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError, name_some
from lightning_bayes.private_torch import NormBase, gradient_hooks


def require_real_and_separate(model: nn.Module) -> None:
    """Refuse trainable parameters that are complex, overlap in memory, or are sharded over processes."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not is_lazy(p)]
    sharded = [name for name, p in trained if hasattr(p, "to_local")]  # a torch.distributed.tensor.DTensor
    if sharded:
        raise UnsupportedTrainingError(
            f"These parameters are DTensors, sharded over processes by fully_shard (FSDP2) or a parallel plan: "
            f"{name_some(sharded)}. Noise and curvature need whole weights, which FSDP2 frees in backward. Keep whole "
            "parameters in each process with strategy='ddp' or 'bayes_ddp'. If memory is short, freeze layers and train "
            "adapters (LoRA)."
        )
    complex_params = [name for name, p in trained if p.is_complex()]
    if complex_params:
        raise UnsupportedLayerError(
            f"These parameters are complex: {name_some(complex_params)}. The square of a complex gradient is not a "
            "curvature. Store real and imaginary parts as two real parameters (see torch.view_as_complex), or freeze them."
        )
    shared = _views_of_the_same_memory(trained)
    if shared:
        raise UnsupportedLayerError(
            f"These parameters are views of the same memory: {name_some(shared)}. They would be measured and sampled "
            "independently. Use the same nn.Parameter in the modules instead, and reshape it in forward."
        )


def require_full_precision(params: Iterable[nn.Parameter]) -> None:
    """Raise `UnsupportedTrainingError` if parameters are stored in half precision."""
    half = {str(param.dtype) for param in params if param.dtype in {torch.float16, torch.bfloat16}}
    if half:
        raise UnsupportedTrainingError(
            f"Parameters are stored as {', '.join(sorted(half))}, where posterior noise and small updates are lost to "
            "rounding. Store them in float32 and train with precision='bf16-mixed' or '16-mixed'."
        )


def rows_without_gradient(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """The rows of embeddings that get no gradient by construction (`padding_idx`).

    A table that other modules share has such a row if it is the padding of all of them, as for two languages with one
    vocabulary. A linear layer that shares it gives the row a gradient.

    Args:
        model: The model.

    Returns:
        A mask ``[rows]`` by parameter.
    """
    paddings: dict[nn.Parameter, set[int | None]] = {}
    for module in model.modules():
        index = module.padding_idx if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else None
        for param in module.parameters(recurse=False):
            paddings.setdefault(param, set()).add(index)
    return {
        table: torch.arange(len(table), device=table.device) == index
        for table, (index, *others) in paddings.items()
        if index is not None and not others
    }


@contextmanager
def changes_refused(units: Iterable[MeasuredModule]) -> Iterator[None]:
    """Raise an error if a user's hook (`torch.Tensor.register_hook`) changes the gradient of a measured parameter."""
    hooked = [(unit, param) for unit in units for param in unit.params.values() if gradient_hooks(param)]
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


@contextmanager
def user_hooks_off(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Run backward passes without users' hooks on the gradients of these parameters."""
    hooked: list[dict[int, Any]] = [hooks for param in params if (hooks := gradient_hooks(param))]
    originals = [dict(hooks) for hooks in hooked]
    try:
        for hooks in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, original in zip(hooked, originals, strict=True):
            hooks.update(original)


def _checked(name: str, hook: Callable[[Tensor], Any], grad: Tensor) -> Any:
    before = grad.clone()
    result = hook(grad)
    if not torch.allclose(before, grad if result is None else result, rtol=0, atol=0, equal_nan=True):
        raise UnsupportedTrainingError(
            f"A hook on {name} changes its gradient, but it cannot change the per-example gradients. Change the loss or "
            "the layer's output instead, or freeze the parameter with requires_grad_(False)."
        )
    return result


def _views_of_the_same_memory(named: list[tuple[str, nn.Parameter]]) -> list[str]:
    spans = sorted((*_span(p), name) for name, p in named if p.numel() and p.device.type != "meta")
    return [f"{first[-1]} and {second[-1]}" for first, second in pairwise(spans) if second[:2] < (first[0], first[2])]


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Device, first byte and end of the memory that `tensor` covers."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def changeable_buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Buffers that a forward may change, with their owners: not those of BatchNorm in evaluation mode, which reads them."""
    owners = [module for module in model.modules() if module.training or not isinstance(module, NormBase)]
    return [(m, name, b) for m in owners for name, b in m.named_buffers(recurse=False) if not is_lazy(b)]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Context that restores buffers, such as BatchNorm's statistics, that a forward inside changes or replaces."""
    kept = [(module, name, buffer, buffer.clone()) for module, name, buffer in changeable_buffers(model)]
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)  # graphs that have saved the buffer keep their version of it
