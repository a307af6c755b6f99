"""Counter-based noise: the noise of a pass is a function of (base seed, update, sample), not of generator state.

Nothing has to be saved for an exact resume, ranks draw different noise by taking different sample numbers, and the
global random number generator is never touched.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def counter_seed(*parts: int) -> int:
    """Mix integers into one 63-bit seed.

    Each part passes through the finaliser of SplitMix64 (Steele et al. 2014), so that seeds of neighbouring counters
    differ in all bits; a CPU generator uses the low 32 only.

    Args:
        *parts: Integers, such as base seed, update and sample.

    Returns:
        The seed, at least 0 and below 2⁶³.

    Example:
        >>> counter_seed(0, 1) == counter_seed(0, 1), counter_seed(0, 1) == counter_seed(1, 0)
        (True, False)
    """
    mixed = 0
    for part in parts:
        mixed = _finalise(mixed ^ (part & _MASK))
    return mixed >> 1


def _finalise(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class CounterNoise:
    """Standard normal draws for one pass, tensor after tensor.

    Args:
        *key: The pass's counter.
    """

    def __init__(self, *key: int) -> None:
        self._seed = counter_seed(*key)
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Draw ε ~ N(0, I), shaped like `tensor`, on its device, in its dtype."""
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return torch.empty_like(tensor).normal_(generator=self._generators[device])
