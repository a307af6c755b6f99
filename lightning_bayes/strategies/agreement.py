"""Equal settings on all ranks: with different hyperparameters or another N they would drift apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from lightning_bayes.errors import RankError


def check_agreement(settings: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Require equal settings on all ranks; one collective, and nothing in a single process.

    Args:
        settings: Values by name; those of two ranks are equal if their `repr` is.
        group: Process group; the default one if None.

    Raises:
        RankError: On every rank, naming each setting that differs and the ranks that have another value.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(found, {name: repr(value) for name, value in settings.items()}, group=group)
    different = list(_differences(found))
    if different:
        raise RankError(
            f"The ranks of this run would drift apart: {'; '.join(different)}. Start every rank with the same arguments, "
            "data and versions."
        )


def _differences(found: list[dict[str, str]]) -> Iterator[str]:
    for name in dict.fromkeys(name for settings in found for name in settings):
        values = [settings.get(name, "missing") for settings in found]
        usual = Counter(values).most_common(1)[0][0]  # of equally many: the first rank's
        others = [f"{value} on rank {rank}" for rank, value in enumerate(values) if value != usual]
        if others:
            yield f"{name} is {usual} on rank {values.index(usual)}, but {', '.join(others)}"
