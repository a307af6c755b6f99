"""Counter-based noise: the noise of a pass is a function of (base seed, update, sample), not of generator state.

Antithetic pairs: the updates 2j and 2j+1 share their draws, with opposite signs, so what noise does to a gradient in the
first order cancels over two updates, and each draw serves twice. Every update's noise is still N(0, I).

Nothing has to be saved for an exact resume, ranks draw different noise by taking different sample numbers, and the
global random number generator is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

PART_ELEMENTS = 2**18
# With fewer, one thread is faster: torch's own keep the other processors for some milliseconds after each operation.
MANY_PARTS = 16

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
    """Standard normal draws for one pass.

    Args:
        *key: The pass's counter.
        sign: What the draws are multiplied by.
        serves_twice: Whether the next update has the same draws.

    Attributes:
        sign: As above.
        serves_twice: As above.
    """

    def __init__(self, *key: int, sign: int = 1, serves_twice: bool = False) -> None:
        self._key, self.sign, self.serves_twice = key, sign, serves_twice
        self._filled = 0

    @classmethod
    def of_pass(cls, seed: int, update: int, sample: int, *, antithetic: bool) -> CounterNoise:
        """The noise of one pass.

        Args:
            seed: Base seed.
            update: Number of updates before it.
            sample: Number of its weight sample.
            antithetic: Whether two updates share their draws.

        Returns:
            The noise.
        """
        if not antithetic:
            return cls(seed, update, sample)
        is_second = update % 2
        return cls(seed, update // 2, sample, sign=-1 if is_second else 1, serves_twice=not is_second)

    @property
    def counter(self) -> tuple[int, ...]:
        """The counter of the next draws."""
        return *self._key, self._filled

    def skip(self) -> None:
        """Go on as if the next draws had been taken."""
        self._filled += 1

    def fill_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with draws of ε ~ N(0, I), other ones at every call.

        Args:
            tensors: Tensors of one device, which share no memory.
        """
        self.draw_(tensors)
        if self.sign < 0:
            torch._foreach_neg_(list(tensors))

    def draw_(self, tensors: Sequence[Tensor]) -> None:
        """As `fill_`, without the sign.

        Large tensors are drawn in parts, each with a counter of its own: a generator draws one number after the other, so
        several of them use several cores, and the draws do not depend on how many.

        Args:
            tensors: Tensors of one device, which share no memory.
        """
        parts = [part for tensor in tensors if tensor.numel() > PART_ELEMENTS for part in _parts(tensor)]
        jobs = [[tensor for tensor in tensors if tensor.numel() <= PART_ELEMENTS], *([part] for part in parts)]
        generators = [self._generator(tensors[0].device, i) for i in range(len(jobs))]
        self._filled += 1
        threads = torch.get_num_threads() if tensors[0].is_cpu else 1
        if threads > 1 and len(parts) >= MANY_PARTS:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(_draw_, jobs, generators))
        else:
            list(map(_draw_, jobs, generators))

    def _generator(self, device: torch.device, job: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(counter_seed(*self._key, self._filled, job))


def _draw_(tensors: Sequence[Tensor], generator: torch.Generator) -> None:
    with torch.no_grad():  # which is off in a new thread
        for tensor in tensors:
            tensor.normal_(generator=generator)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    if not (tensor.is_cpu and tensor.is_contiguous()):
        return [tensor]
    return torch.split(tensor.view(-1), PART_ELEMENTS)
