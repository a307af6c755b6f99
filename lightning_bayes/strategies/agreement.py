"""Check that all ranks use the same settings; with different hyperparameters or N they would drift apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from lightning_bayes.errors import RankError


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
