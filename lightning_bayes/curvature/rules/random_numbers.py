"""Reading, setting and temporarily replacing the state of the global random number generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def rng_state() -> list[Tensor]:
    """The state of the global generators, the CPU's first."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *cuda]


def set_rng(state: list[Tensor]) -> None:
    """Restore the global generators to `state`."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])


def same_rng(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two states are equal: no random number was drawn in between."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def with_rng(state: list[Tensor] | None, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` with the global generators temporarily set to `state`; None leaves them as they are."""
    if state is None:
        return function(*args)
    with torch.random.fork_rng(devices=range(len(state) - 1)):
        set_rng(state)
        return function(*args)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the global generators of the CPU and of `device`; restore their state on exit."""
    # Modules with a generator, its device, and the arguments that select it. Apple GPUs have a single one.
    places: list[tuple[Any, torch.device, tuple[torch.device, ...]]] = [(torch, torch.device("cpu"), ())]
    if device.type != "cpu":
        places.append((getattr(torch, device.type), device, (device,) if device.type == "cuda" else ()))
    states = [module.get_rng_state(*index) for module, _, index in places]
    try:
        for module, place, index in places:
            module.set_rng_state(torch.Generator(place).manual_seed(seed).get_state(), *index)
        yield
    finally:
        for (module, _, index), state in zip(places, states, strict=True):
            module.set_rng_state(state, *index)


def new_seed() -> int:
    """Draw a seed from the CPU's global generator."""
    return int(torch.randint(2**63 - 1, ()))
