"""Tensors sharded over processes by `torch.distributed.fsdp.fully_shard` (FSDP2), in rows of dimension 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Rows(NamedTuple):
    """The elements of a sharded tensor that this process holds: a range of the flattened whole tensor."""

    size: int  # number of elements of the whole tensor
    start: int
    stop: int


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a `torch.distributed.tensor.DTensor`."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local(tensor: Any) -> Any:
    """This process's shard of a tensor, in the same memory; other values are returned unchanged."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # with gradients, each call would return a new tensor
        return tensor.to_local()


def whole(tensor: Any) -> Any:
    """The whole tensor, gathered by a collective call of all processes; other values are returned unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def rows_of(param: Tensor) -> Rows:
    """The elements of a parameter that this process holds."""
    if not is_sharded(param):
        return Rows(param.numel(), 0, param.numel())
    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    shard_size = -(-param.shape[0] // mesh.size()) * (param.numel() // max(1, param.shape[0]))  # like torch.chunk
    start = min(param.numel(), shard_size * mesh.get_local_rank())
    return Rows(param.numel(), start, start + local(param).numel())


def rows_like(value: Tensor, param: Tensor) -> Tensor:
    """View of the part of a whole tensor that corresponds to this process's shard of `param`."""
    if not is_sharded(param):
        return value
    _, start, stop = rows_of(param)
    return value.reshape(-1)[start:stop].view(local(param).shape)


def shards(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this module itself."""
    return callable(getattr(module, "reshard", None))


def free_gathered(model: nn.Module) -> None:
    """Let FSDP2 free gathered parameters, so that the next forward gathers the current values."""
    for module in model.modules():
        if shards(module):
            module.reshard()  # type: ignore[operator]


@torch.no_grad()
def put_rows_(model: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy new values of this process's shards into tensors of a model; FSDP2 gathers from the same memory."""
    if any(is_sharded(target) for target, _ in pairs):
        free_gathered(model)
    for target, value in pairs:
        local(target).copy_(value)
