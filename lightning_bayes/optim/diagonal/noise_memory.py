"""Memory for the noise and the samples of a cohort: small tensors share one flat buffer, large ones have their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature.spread import Rows, local, rows_of
from lightning_bayes.optim.effective import Effective
from lightning_bayes.optim.runtime.noise import CounterNoise, Pool
from lightning_bayes.optim.runtime.shards import slices_of
from lightning_bayes.posteriors import Shape

SMALL = 2**16  # elements of a tensor that shares the flat buffer


@final
class CohortMemory:
    """Memory of one cohort, and what is known of its noise.

    Args:
        params: Its parameters.

    Attributes:
        owners: Its parameters.
        params: Their parts that this process holds: the parameters themselves, unless FSDP2 spreads them.
        rows: Which parts these are; None where all are whole.
        small: Numbers of the parameters in the flat buffer.
        large: Numbers of the others.
        sizes: Number of elements of the small ones.
        flat: Their samples.
        flat_parts: That of each, flat.
        views: Their samples, shaped like them, by number.
        roots: Square root of the number of elements of every parameter, ``[params]``.
        kept: The pool of the last draws; None for none.
        origin: The source of `counted`, `means` and `unit`.
        counted: s of every parameter; s + δ̃ where weights have priors of their own.
        means: mean 1/(s + γ_t) and γ_t, ``[params]`` each; None where the noise is that of the bound.
        shape: The shape of the noise; None before the first one, or where it is that of the bound.
        factors: 1/√(Ñ/τ_t) of every parameter; empty where reading it would wait for a device.
        unit: u = 1/√(max(s, 0) + γ_t) of the small parameters, flat.
        unit_parts: That of each, flat.
        last: The parts of the last sample's noise: effective hyperparameters, shape, curvatures.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.owners, self.params = list(params), [local(param) for param in params]
        params, rows = self.params, [rows_of(param) for param in params]
        is_spread = any(owner is not param for owner, param in zip(self.owners, self.params, strict=True))
        self.rows = rows if is_spread else None
        is_small = [row.size <= SMALL and param.is_contiguous() for row, param in zip(rows, params, strict=True)]
        self.small = [i for i, small in enumerate(is_small) if small]
        self.large = [i for i, small in enumerate(is_small) if not small]
        self.sizes = [params[i].numel() for i in self.small]
        self.flat = params[0].new_empty(sum(self.sizes))
        self.flat_parts = self.split(self.flat)
        self.views = self.shaped_like(self.flat)
        counts, numbers = (torch.tensor(n, dtype=torch.long, device=self.flat.device) for n in (self.sizes, self.small))
        self._owner = numbers.repeat_interleave(counts)  # of each flat element
        self.roots = self.flat.new_tensor([param.numel() ** 0.5 for param in params])
        self.kept: tuple[Pool, Tensor] | None = None
        self.origin: Any = None
        self.counted: list[Tensor] = []
        self.means: tuple[Tensor, Tensor] | None = None
        self.shape: Shape | None = None
        self.factors: list[float] = []
        self._shaped_for: tuple[float, float, list[Tensor]]
        self.unit, self.unit_parts = self.flat, self.flat_parts
        self.last: tuple[Effective, Shape | None, list[Tensor]]

    def fits(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether these are its parameters, where and as they were."""
        return (
            len(params) == len(self.owners)
            and all(
                a is b and (i not in self.views or (self.views[i].shape == local(b).shape and b.is_contiguous()))
                for i, (a, b) in enumerate(zip(self.owners, params, strict=True))
            )
            and (self.rows is None or all(local(b) is a for a, b in zip(self.params, params, strict=True)))
            and params[0].device == self.flat.device
            and params[0].dtype == self.flat.dtype
        )

    def set_unit(self, unit: Tensor) -> None:
        """Set u of the small parameters."""
        self.unit, self.unit_parts = unit, self.split(unit)

    def has_shape_of(self, relative_noise: float, scale: float, sizes: Sequence[Tensor]) -> bool:
        """Whether `shape` was computed for these κ, Ñ/τ and r_t, the very tensors."""
        *numbers, known = self._shaped_for
        return numbers == [relative_noise, scale] and all(a is b for a, b in zip(known, sizes, strict=True))

    def set_shape(self, shape: Shape, relative_noise: float, scale: float, sizes: Sequence[Tensor]) -> None:
        """Set the shape of the noise, which was computed for these κ, Ñ/τ and r_t."""
        self.shape, self._shaped_for = shape, (relative_noise, scale, list(sizes))
        self.factors = [scale**-0.5 for scale in shape.scale.tolist()] if shape.scale.is_cpu else []

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat tensor that belong to each small parameter."""
        return list(torch.split(flat, self.sizes)) if self.small else []

    def shaped_like(self, flat: Tensor) -> dict[int, Tensor]:
        """Views of a flat tensor of all small parameters, by number."""
        return {i: part.view(self.params[i].shape) for part, i in zip(self.split(flat), self.small, strict=True)}

    def spread(self, values: Tensor) -> Tensor:
        """One value for each parameter, ``[params]``, repeated for each element of the small ones."""
        return values.index_select(0, self._owner)  # several times as fast as values[self._owner]

    def in_order(self, large: Sequence[Tensor], small: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Tensors of all parameters in their order.

        Args:
            large: Those of the large ones.
            small: Those of the small ones, by default the views of their samples.

        Returns:
            All of them.
        """
        found = dict(zip(self.large, large, strict=True))
        found |= self.views if small is None else dict(zip(self.small, small, strict=True))
        return [found[i] for i in range(len(self.params))]

    def draws(self, noise: CounterNoise, large: Sequence[Tensor], *, pooled: bool) -> list[Tensor]:
        """ε except for its sign.

        Args:
            noise: The pass's noise.
            large: Memory of the large parameters' samples, which ε takes unless it comes from a pool.
            pooled: Whether antithetic noise comes from a pool.

        Returns:
            That of the small parameters, flat, and that of every large one.
        """
        if self.rows is not None:
            return self._draws_of(self.rows, noise)
        pool = noise.next_pool() if pooled else None
        if pool is None:
            small = torch.empty_like(self.flat)
            noise.draw_([small, *large] if self.small else large)
            return [small, *large]
        sizes = [len(self.flat), *(self.params[i].numel() for i in self.large)]
        if self.kept is None or self.kept[0].counter != pool.counter:
            self.kept = None  # before memory for the next one is taken
            self.kept = pool, pool.draw(sum(sizes), self.flat)
        return list(torch.split(pool.window(self.kept[1], sum(sizes)), sizes))

    def _draws_of(self, rows: Sequence[Rows], noise: CounterNoise) -> list[Tensor]:
        """The rows' part of the draws of whole parameters; not from a pool, of which they would need all."""
        joined = [slices_of([rows[i] for i in self.small]), *(slices_of([rows[i]]) for i in self.large)]
        asked = [(size, list(slices)) for size, slices in (joined if self.small else joined[1:])]
        drawn = noise.draw_slices([size for size, _ in asked], [slices for _, slices in asked], self.flat)
        return drawn if self.small else [self.flat, *drawn]


def room_for(param: nn.Parameter, known: dict[nn.Parameter, Tensor]) -> Tensor:
    """Memory for one value of a parameter, the same at each call while the parameter stays where it is.

    Args:
        param: The parameter.
        known: The results of earlier calls; changed in place.

    Returns:
        The memory, with arbitrary content.
    """
    room = known.get(param)
    if room is None or room.device != param.device or room.dtype != param.dtype:
        room = known[param] = torch.empty_like(param, requires_grad=False)
    return room
