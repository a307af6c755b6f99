"""A single flat all-reduce of all quantities that a step measured.

    ĝ = Σ_r n_r ĝ_r / Σ_r n_r        ĥ = Σ_r n_r ĥ_r / Σ_r n_r        n_r examples on rank r

ĥ is the mean of squares, never the square of DDP's mean gradient. BatchNorm's running statistics are averaged too, because
DDP's own buffer synchronisation is off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_MIB = 2**20


@torch.no_grad()
def all_reduce_mean_(
    tensors: Sequence[Tensor],
    weight: float,
    group: dist.ProcessGroup | None = None,
    bucket_mib: float | None = None,
) -> int:
    """Replace tensors by their weighted mean over ranks, in collectives of `bucket_mib`; returns the bytes sent."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1 or not tensors:
        return 0
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    flat = torch.cat(
        [t.reshape(-1).to(dtype) for t in tensors] + [torch.ones(1, dtype=dtype, device=tensors[0].device)]
    )
    flat.mul_(weight)
    for bucket in torch.split(flat, _elements(bucket_mib, flat)):
        dist.all_reduce(bucket, group=group)
    flat.div_(flat[-1].clone())
    for tensor, mean in zip(tensors, torch.split(flat[:-1], [t.numel() for t in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))
    return flat.numel() * flat.element_size()


@torch.no_grad()
def all_reduce_sum_(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, bucket_mib: float | None = None
) -> None:
    """Replace `tensors` by their sums over ranks; arguments as in `all_reduce_mean_`."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for bucket in torch.split(flat, _elements(bucket_mib, flat)):
        dist.all_reduce(bucket, group=group)
    for tensor, total in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def _elements(bucket_mib: float | None, flat: Tensor) -> int:
    return flat.numel() if bucket_mib is None else max(1, int(bucket_mib * _MIB) // flat.element_size())
