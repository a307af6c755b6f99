"""Finding the ranks that are gone after a collective has failed.

The error that a rank sees names a socket at best. So every rank that still runs writes its name to the store through which
the process group was formed, and waits a moment for the names of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from lightning_bayes.private_torch import default_store

_PAUSE = 0.05  # seconds between two looks into the store
_DEAD = "lightning_bayes/dead"  # key of the ranks that another rank knows to have ended


def is_of_collective(error: BaseException) -> bool:
    """Whether an error comes from the communication between ranks.

    Args:
        error: Any error.

    Returns:
        Whether it is one of torch's, or of gloo, which raises a bare RuntimeError.
    """
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def unresponsive_ranks(seconds: float, known_dead: Callable[[], list[int]] = list) -> list[int]:
    """Find the ranks that do not respond.

    Args:
        seconds: How long to wait for an answer.
        known_dead: Returns the ranks that this one knows to have ended; once there are any, the wait ends on all ranks.

    Returns:
        The ranks. If the store itself is gone, the first one, which hosts it unless a launcher does.
    """
    rank, others = dist.get_rank(), set(range(dist.get_world_size())) - {dist.get_rank()}
    deadline = time.monotonic() + seconds
    try:
        store = default_store()
        store.set(_key(rank), "here")
        while others and time.monotonic() < deadline:
            if dead := known_dead():
                store.set(_DEAD, ",".join(map(str, dead)))
            if store.check([_DEAD]):
                return [int(found) for found in store.get(_DEAD).decode().split(",")]
            others = {other for other in others if not store.check([_key(other)])}
            time.sleep(_PAUSE)
    except RuntimeError:  # a DistNetworkError or DistStoreError
        return [0]
    return sorted(others)


def _key(rank: int) -> str:
    return f"lightning_bayes/still_here/{rank}"
