"""The global random numbers: read, set and lent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def rng_state() -> list[Tensor]:
    """The state of the global generators, the processor's first."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *cuda]


def set_rng(state: list[Tensor]) -> None:
    """Put the global generators into `state`."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])


def same_rng(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether nothing was drawn between two states."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def with_rng(state: list[Tensor] | None, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` with the random numbers that the forward pass drew, and leave the global generators alone."""
    if state is None:
        return function(*args)
    with torch.random.fork_rng(devices=range(len(state) - 1)):
        set_rng(state)
        return function(*args)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the processor's and the device's global generators, and put back what they were on exit.

    Args:
        device: The device of the numbers.
        seed: The seed.

    Yields:
        Nothing.
    """
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        for each in cuda:
            torch.cuda.set_rng_state(torch.Generator(each).manual_seed(seed).get_state(), each)
        yield


def new_seed() -> int:
    """A seed from the processor's global generator."""
    return int(torch.randint(2**63 - 1, ()))
