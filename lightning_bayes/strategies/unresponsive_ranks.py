"""Find the unresponsive ranks after a collective has failed.

The original error names a socket at best. So every running rank writes its number to the store of the process group, and
waits for the other ranks to do the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from lightning_bayes.private_torch import default_store

_PAUSE = 0.05  # seconds between two polls of the store
_DEAD = "lightning_bayes/dead"  # key for the ranks that are known to have ended


def is_of_collective(error: BaseException) -> bool:
    """Whether an error comes from the communication between ranks."""
    # gloo raises a bare RuntimeError.
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


def unresponsive_ranks(seconds: float, known_dead: Callable[[], list[int]] = list) -> list[int]:
    """Find the ranks that do not respond.

    Args:
        seconds: Maximum time to wait for an answer.
        known_dead: Returns the ranks that this rank knows to have ended. If there are any, all ranks stop waiting.

    Returns:
        The unresponsive ranks. If the store itself is gone: rank 0, which hosts the store unless a launcher does.
    """
    rank, others = dist.get_rank(), set(range(dist.get_world_size())) - {dist.get_rank()}
    deadline = time.monotonic() + seconds
    try:
        store = default_store()
        store.set(_key(rank), "here")
        while others and time.monotonic() < deadline:
            if ended := known_dead():
                store.set(_DEAD, ",".join(map(str, ended)))
            if store.check([_DEAD]):
                return [int(dead) for dead in store.get(_DEAD).decode().split(",")]
            others = {other for other in others if not store.check([_key(other)])}
            time.sleep(_PAUSE)
    except RuntimeError:  # DistNetworkError or DistStoreError
        return [0]
    return sorted(others)


def _key(rank: int) -> str:
    return f"lightning_bayes/still_here/{rank}"
