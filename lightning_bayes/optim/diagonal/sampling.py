"""Samples of cohorts, θ = μ ± σ ε, without doing anything twice that one update leaves as it was for the next.

Several updates take their ε from one pool (`optim.runtime.noise`), and the noise's shape u = 1/√(max(s, 0) + γ_t) changes
with the curvature only. So the pool is kept from update to update, and what depends on the curvature from one measurement
to the next: means for every tensor, u itself for the small ones. Neither is state: a resumed run computes both again, to
the same bits. A tensor's size r_t is that after the update that measured; it is state, because the mean moves on.

A small model's step is hundreds of operations that each take as long to start as to run. Small tensors therefore share one
flat buffer for their u and their samples, of which the layers see views. Large ones are taken in blocks that stay in the
processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.diagonal.noise_memory import CohortMemory
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.readout.shape import sizes_of
from lightning_bayes.optim.runtime.blocks import blocks
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.shards import local_parts
from lightning_bayes.optim.weight_prior import noise_terms, without_prior
from lightning_bayes.posteriors import Shape, noise_scale, precision, shaped_precision
from lightning_bayes.posteriors.shaped_noise import noise_damping
from lightning_bayes.private_torch import version_of


class _Origin(NamedTuple):
    """Everything that the noise of a cohort depends on, except for μ and ε."""

    curvatures: list[Tensor]
    versions: list[int]
    numbers: tuple[float, ...]

    def is_same(self, other: _Origin) -> bool:
        return (
            self.versions == other.versions
            and self.numbers == other.numbers
            and all(a is b for a, b in zip(self.curvatures, other.curvatures, strict=True))
        )


@final
class CohortSampler:
    """Draws the samples of an optimizer's cohorts."""

    def __init__(self) -> None:
        self._cohorts: dict[nn.Parameter, CohortMemory] = {}  # by the first parameter
        self._sampled: list[CohortMemory] = []  # since `start`

    def start(self) -> None:
        """Forget the samples of the last pass."""
        self._sampled.clear()

    @torch.no_grad()
    def sample(
        self,
        params: Sequence[nn.Parameter],
        states: Sequence[Mapping[str, Any]],
        group: Mapping[str, Any],
        noise: CounterNoise,
        buffers: Callable[[nn.Parameter], Tensor],
        *,
        pooled: bool,
    ) -> list[Tensor]:
        """A sample of each parameter.

        Args:
            params: The cohort; their values are μ.
            states: Their optimizer states.
            group: Their parameter group.
            noise: The pass's noise.
            buffers: Gives memory for a large parameter.
            pooled: Whether antithetic noise comes from a pool, which is kept and takes the memory of one more sample.

        Returns:
            The samples, in memory that the next sample overwrites.
        """
        cohort = self._cohorts.get(params[0])
        if cohort is None or not cohort.fits(params):
            cohort = self._cohorts[params[0]] = CohortMemory(params)
        params, states = local_parts(params, states)
        shape, now = self._shape(cohort, states, group)
        curvatures = cohort.counted
        cohort.last = now, shape, curvatures
        self._sampled.append(cohort)
        large = [buffers(params[i]) for i in cohort.large]
        draws = cohort.draws(noise, large, pooled=pooled)
        if cohort.small:
            _write_small(cohort, params, draws[0], shape, noise.sign)
        for i, target, epsilon in zip(cohort.large, large, draws[1:], strict=True):
            numbers, factor = _at(shape, i), float(noise.sign)
            if cohort.factors and numbers is not None:  # one pass over the block less
                numbers, factor = (None, numbers[1]), factor * cohort.factors[i]
            _write_large(target, epsilon, params[i], curvatures[i], now, numbers, factor)
        return cohort.in_order(large)

    @torch.no_grad()
    def scores(
        self,
        params: Iterable[nn.Parameter],
        means: Mapping[nn.Parameter, Tensor],
        empty: Callable[[nn.Parameter], Tensor],
    ) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ of the last sample, whose mean product with the gradient is the Hessian's diagonal.

        Args:
            params: Parameters; those without a sample are left out.
            means: μ by parameter, its part that this process holds; the parameters themselves are θ.
            empty: Gives memory for the result of a parameter.

        Returns:
            By parameter, shaped like it.
        """
        wanted, found = {param for param in params if param in means}, dict[nn.Parameter, Tensor]()
        for cohort in self._sampled:
            now, shape, curvatures = cohort.last
            for i in (i for i in cohort.large if cohort.owners[i] in wanted):
                param, owner, score = cohort.params[i], cohort.owners[i], empty(cohort.params[i])
                for block in blocks([param]):
                    room = block.join([score])
                    torch.sub(block.join([param]), block.join([means[owner]]), out=room)
                    block.write_([score], room.mul_(_precision(block.join([curvatures[i]]), now, _at(shape, i))))
                found[owner] = score
            if small := [i for i in cohort.small if cohort.owners[i] in wanted]:
                found |= _small_scores(cohort, small, means)
        return found

    def forget_draws(self) -> None:
        """Give the memory of ε back."""
        for cohort in self._cohorts.values():
            cohort.kept = None

    def _shape(
        self, cohort: CohortMemory, states: Sequence[Mapping[str, Any]], group: Mapping[str, Any]
    ) -> tuple[Shape | None, Effective]:
        """The noise's shape, see `posteriors.noise_shape`, None where the noise is that of the bound; and u of the small."""
        measured, has_own = [state["curvature"] for state in states], "prior_precision" in states[0]
        now = without_prior(effective(group)) if has_own else effective(group)
        is_shaped = now.relative_noise is not None
        numbers = (now.stated_damping, now.noise_flatness) if is_shaped else tuple(now.precision_arguments.values())
        numbers = (is_shaped, *numbers, now.scale if has_own else 0.0)
        origin = _Origin(measured, [version_of(tensor) for tensor in measured], numbers)
        if cohort.origin is None or not cohort.origin.is_same(origin):
            cohort.origin, cohort.shape = origin, None
            cohort.counted = curvatures = noise_terms(group, states)[1]
            small = torch.cat([cohort.flat[:0], *(curvatures[i].reshape(-1) for i in cohort.small)])
            if is_shaped:
                cohort.means = _moments(cohort, small, curvatures, now.stated_damping, now.noise_flatness)
            else:
                cohort.means = None
                cohort.set_unit(precision(small, **now.precision_arguments).rsqrt_())
        if cohort.means is None or now.relative_noise is None:
            return None, now
        sizes = sizes_of(states, cohort.params)
        if cohort.shape is None or not cohort.has_shape_of(now.relative_noise, now.scale, sizes):
            inverse_means, strengths = cohort.means
            scale = noise_scale(inverse_means, torch.stack(sizes), now.relative_noise, now.scale)
            cohort.set_shape(Shape(scale, strengths), now.relative_noise, now.scale, sizes)
        return cohort.shape, now


def _at(shape: Shape | None, i: int) -> tuple[Tensor | None, Tensor] | None:
    return None if shape is None else (shape.scale[i], shape.damping[i])


def _precision(curvature: Tensor, now: Effective, shape: tuple[Tensor | None, Tensor] | None) -> Tensor:
    """1/Σ; divided by the scale if the shape has none."""
    if shape is None:
        return precision(curvature, **now.precision_arguments)
    scale, damping = shape
    return curvature.clamp_min(0).add_(damping) if scale is None else shaped_precision(curvature, scale, damping)


def _moments(
    cohort: CohortMemory, small: Tensor, curvatures: list[Tensor], stated: float, flatness: float
) -> tuple[Tensor, Tensor]:
    """`posteriors.noise_moments` of a cohort, and u of its small tensors on the way."""
    counts = cohort.roots.square()
    positive = small.clamp_min(0)
    sums = cohort.in_order([_sum_of_blocks(curvatures[i], 0.0) for i in cohort.large], _sums(cohort, positive))
    strengths = noise_damping(torch.stack(sums) / counts, stated, flatness)
    inverse = positive.add_(cohort.spread(strengths)).reciprocal_()
    cohort.set_unit(inverse.sqrt())
    sums = cohort.in_order([_sum_of_blocks(curvatures[i], strengths[i]) for i in cohort.large], _sums(cohort, inverse))
    return torch.stack(sums) / counts, strengths


def _sums(cohort: CohortMemory, flat: Tensor) -> list[Tensor]:
    """Sums over each small tensor of numbers that are not negative."""
    return list(torch._foreach_norm(cohort.split(flat), 1)) if cohort.small else []


def _sum_of_blocks(curvature: Tensor, damping: Tensor | float) -> Tensor:
    """Σ max(s, 0), or Σ 1/(max(s, 0) + γ) with a damping γ."""
    parts = (block.join([curvature]).clamp_min(0) for block in blocks([curvature]))
    if isinstance(damping, Tensor):
        parts = (part.add_(damping).reciprocal_() for part in parts)
    return torch.stack([part.sum() for part in parts]).sum()


def _small_scores(
    cohort: CohortMemory, small: Sequence[int], means: Mapping[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Tensor]:
    params = [cohort.owners[i] for i in small]
    found = torch._foreach_sub([cohort.views[i] for i in small], [means[param] for param in params])
    precisions = cohort.unit.square().reciprocal_()  # 1/Σ = scale/u²
    if (shape := cohort.last[1]) is not None:
        precisions.mul_(cohort.spread(shape.scale))
    views = cohort.shaped_like(precisions)
    torch._foreach_mul_(found, [views[i] for i in small])
    return dict(zip(params, found, strict=True))


def _write_small(
    cohort: CohortMemory, params: Sequence[nn.Parameter], epsilon: Tensor, shape: Shape | None, sign: int
) -> None:
    means: list[Tensor] = [params[i] for i in cohort.small]
    if not epsilon.is_cpu:
        std = cohort.unit if shape is None else cohort.unit * cohort.spread(shape.scale.rsqrt())
        torch.addcmul(torch.cat([mean.view(-1) for mean in means]), epsilon, std, value=sign, out=cohort.flat)
        return
    factors = [float(sign) if shape is None else sign * cohort.factors[i] for i in cohort.small]
    torch._foreach_copy_(list(cohort.views.values()), means)
    torch._foreach_addcmul_(cohort.flat_parts, cohort.split(epsilon), cohort.unit_parts, factors)


def _write_large(
    target: Tensor,
    epsilon: Tensor,
    mean: Tensor,
    curvature: Tensor,
    now: Effective,
    shape: tuple[Tensor | None, Tensor] | None,
    factor: float,
) -> None:
    for block in blocks([mean]):
        std = _precision(block.join([curvature]), now, shape).rsqrt_()
        room = block.join([target])  # which may hold ε
        torch.addcmul(block.join([mean]), block.join([epsilon]), std, value=factor, out=room)
        block.write_([target], room)
