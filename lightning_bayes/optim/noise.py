"""Counter-based noise: the noise of a pass is a function of (base seed, update, sample), not of generator state.

An exact resume therefore needs no saved state, ranks draw different noise by using different sample indices, and the
global random number generator is never touched.

Antithetic pairs: updates 2j and 2j+1 use the same draws with opposite signs. The first-order effect of noise on the gradient
cancels over the pair, and a family may keep the draws for the second update. The noise of every single update is still
N(0, I).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

PART_ELEMENTS = 2**18
MANY_PARTS = 16  # with fewer, one thread is faster: torch's threads spin for some milliseconds after each operation

_MASK = (1 << 64) - 1


def counter_seed(*parts: int) -> int:
    """Mix integers into one 63-bit seed.

    Each part passes through the finaliser of SplitMix64 (Steele et al. 2014), so that neighbouring counters differ in all
    bits. A CPU generator uses only the low 32 bits.

    Args:
        *parts: Integers such as base seed, update and sample.

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
        seed: Base seed.
        update: Number of updates before this one.
        sample: Index of the weight sample.
        antithetic: Whether updates 2j and 2j+1 share their draws. The counter is then (seed, j, sample).

    Attributes:
        sign: Factor of the draws, 1 or -1.
        counter: Counter of the next draws, without their sign.
        has_twin: Whether the next update uses the same draws with the opposite sign.
    """

    def __init__(self, seed: int, update: int = 0, sample: int = 0, *, antithetic: bool = False) -> None:
        self.sign = -1 if antithetic and update % 2 else 1
        self.counter: tuple[int, ...] = (seed, update // 2 if antithetic else update, sample, 0)
        self.has_twin = antithetic and self.sign > 0

    def skip(self) -> None:
        """Advance the counter as `draw_` does."""
        *key, draws = self.counter
        self.counter = (*key, draws + 1)

    def fill_(self, tensors: Sequence[Tensor]) -> None:
        """Fill tensors with ε ~ N(0, I), fresh at every call.

        Args:
            tensors: Tensors on one device that share no memory.
        """
        self.draw_(tensors)
        if self.sign < 0:
            torch._foreach_neg_(list(tensors))

    def draw_(self, tensors: Sequence[Tensor]) -> None:
        """`fill_` without the sign.

        Large tensors are drawn in parts, each with its own counter. A generator is sequential, so several of them can use
        several cores, and the result does not depend on the number of cores.

        Args:
            tensors: Tensors on one device that share no memory.
        """
        parts = [part for tensor in tensors if tensor.numel() > PART_ELEMENTS for part in _parts(tensor)]
        jobs = [[tensor for tensor in tensors if tensor.numel() <= PART_ELEMENTS], *([part] for part in parts)]
        generators = [self._generator(tensors[0].device, i) for i in range(len(jobs))]
        self.skip()
        threads = torch.get_num_threads() if tensors[0].is_cpu else 1
        if threads > 1 and len(parts) >= MANY_PARTS:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(_draw_, jobs, generators))
        else:
            list(map(_draw_, jobs, generators))

    def _generator(self, device: torch.device, job: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(counter_seed(*self.counter, job))


def _draw_(tensors: Sequence[Tensor], generator: torch.Generator) -> None:
    with torch.no_grad():  # a new thread does not inherit it
        for tensor in tensors:
            tensor.normal_(generator=generator)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    if not (tensor.is_cpu and tensor.is_contiguous()):
        return [tensor]
    return torch.split(tensor.view(-1), PART_ELEMENTS)
