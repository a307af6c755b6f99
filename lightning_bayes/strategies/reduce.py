"""A single flat all-reduce of all quantities that a step measured.

    ĝ = Σ_r n_r ĝ_r / Σ_r n_r        ĥ = Σ_r n_r ĥ_r / Σ_r n_r        n_r examples on rank r

ĥ is the mean of squares, never the square of DDP's mean gradient. BatchNorm's running statistics are averaged too, because
DDP's own buffer synchronisation is off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bayes.errors import RankError

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


def check_agreement(settings: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise `RankError` on every rank, with all differences, unless the settings are equal on all, compared by `repr`."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    by_rank: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(by_rank, {name: repr(value) for name, value in settings.items()}, group=group)
    different = list(_differences(by_rank))
    if different:
        raise RankError(
            f"The ranks of this run would drift apart: {'; '.join(different)}. Start every rank with the same arguments, "
            "data and versions."
        )


def _differences(by_rank: list[dict[str, str]]) -> Iterator[str]:
    for name in dict.fromkeys(name for settings in by_rank for name in settings):
        values = [settings.get(name, "missing") for settings in by_rank]
        usual = Counter(values).most_common(1)[0][0]  # on a tie, the value of the lowest rank
        others = [f"{value} on rank {rank}" for rank, value in enumerate(values) if value != usual]
        if others:
            yield f"{name} is {usual} on rank {values.index(usual)}, but {', '.join(others)}"
