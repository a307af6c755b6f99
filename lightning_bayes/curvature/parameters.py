"""Checks of a model's trainable parameters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_bayes.curvature.sharding import is_sharded
from lightning_bayes.errors import UnsupportedLayerError, UnsupportedTrainingError, name_some


def require_real_and_separate(model: nn.Module, *, allow_sharded: bool = False) -> None:
    """Refuse trainable parameters that are complex, overlap in memory, or are sharded (unless `allow_sharded`)."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not is_lazy(p)]
    sharded = [name for name, p in trained if is_sharded(p)]
    if sharded and not allow_sharded:
        raise UnsupportedTrainingError(
            f"These parameters are DTensors, sharded over processes by fully_shard (FSDP2) or a parallel plan: "
            f"{name_some(sharded)}. Per-example and per-layer curvature needs whole weights, which FSDP2 frees in backward. "
            "Use a method that needs only the mean gradient (IVON, Vadam), or keep whole parameters in each process with "
            "strategy='ddp' or 'bayes_ddp'. If memory is short, freeze layers and train adapters (LoRA)."
        )
    complex_params = [name for name, p in trained if p.is_complex()]
    if complex_params:
        raise UnsupportedLayerError(
            f"These parameters are complex: {name_some(complex_params)}. The square of a complex gradient is not a "
            "curvature. Store real and imaginary parts as two real parameters (see torch.view_as_complex), or freeze them."
        )
    shared = [] if sharded else _views_of_the_same_memory(trained)
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


def _views_of_the_same_memory(named: list[tuple[str, nn.Parameter]]) -> list[str]:
    spans = sorted((*_span(p), name) for name, p in named if p.numel() and p.device.type != "meta")
    return [f"{first[-1]} and {second[-1]}" for first, second in pairwise(spans) if second[:2] < (first[0], first[2])]


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Device, first byte and end of the memory that `tensor` covers."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
