"""Posterior samples θ = μ ± σ ε of a cohort: parameters of one device, dtype and update count.

Most updates change neither the curvature nor the draws, so a cohort caches three quantities:

    ε                       one pool of draws serves several updates (`optim.runtime.noise`)
    u = 1/√(max(s, 0) + γ)  changes with the curvature only; large tensors recompute it block by block
    Ñ/τ_t, γ_t              the shape of the noise (`posteriors.shaped_noise`), which the optimizer computes now and then

None of these caches is optimizer state: a resumed run recomputes them to the same bits.

A step of a small model is hundreds of operations that take as long to launch as to run. Small tensors therefore share one
flat buffer for u and for their samples, and the layers see views of it. Large tensors are processed in blocks that stay in
the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.readout.noise_terms import NoiseTerms, State
from lightning_bayes.optim.runtime.blocks import blocks
from lightning_bayes.optim.runtime.noise import CounterNoise, Pool
from lightning_bayes.posteriors import NoiseShape, precision, shaped_precision

SMALL = 2**16  # elements; smaller tensors share the flat buffer


@final
class CohortNoise:
    """Draws posterior samples of a cohort.

    Args:
        params: The parameters.

    Attributes:
        owners: The parameters.
        flat: Samples of all small parameters, in one buffer.
        cached_pool: The pool of the last draws; None if released.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.owners = list(params)
        self._params: list[Tensor] = list(params)
        is_small = [param.numel() <= SMALL and param.is_contiguous() for param in params]
        self._small = [i for i, small in enumerate(is_small) if small]
        self._large = [i for i, small in enumerate(is_small) if not small]
        self._sizes = [self._params[i].numel() for i in self._small]
        self.flat = self._params[0].new_empty(sum(self._sizes))
        self._flat_parts = self._split(self.flat)
        self._views = self._shaped_like(self.flat)
        counts, indices = (
            torch.tensor(n, dtype=torch.long, device=self.flat.device) for n in (self._sizes, self._small)
        )
        self._param_index = indices.repeat_interleave(counts)  # index of the parameter of each flat element
        self.cached_pool: tuple[Pool, Tensor] | None = None
        self._terms = NoiseTerms()
        self._unit_std = self._unit_precision = self.flat  # u and 1/u² of the small parameters
        self._unit_std_parts = self._flat_parts
        # Of the last sample:
        self._shape: NoiseShape | None = None  # [params]; None: noise of the bound
        self._small_shape: NoiseShape  # the same for each element of the small parameters
        self._factors: list[float] = []  # 1/√(Ñ/τ_t); empty if reading it would synchronise with a device

    def sample(
        self,
        states: Sequence[State],
        group: Mapping[str, Any],
        noise: CounterNoise,
        buffer: Callable[[Tensor], Tensor],
        *,
        pooled: bool,
    ) -> list[Tensor]:
        """Draw a sample of every parameter; the parameters hold μ.

        Args:
            states: Optimizer states of the local parts.
            group: Their parameter group.
            noise: Noise of the pass.
            buffer: Returns scratch memory for a large parameter.
            pooled: Whether antithetic noise comes from a pool. The pool is cached, which needs the memory of one more
                sample.

        Returns:
            The samples in the parameters' order, in memory that the next sample overwrites.
        """
        has_changed = self._terms.refresh(group, states, self._params)
        if self._terms.shape is not self._shape:
            self._set_shape(self._terms.shape)
        if has_changed:
            self._update_unit_std()
        large = [buffer(self._params[i]) for i in self._large]
        draws = self.draws(noise, large, pooled=pooled)
        if self._small:
            self._write_small(draws[0], noise.sign)
        for i, target, epsilon in zip(self._large, large, draws[1:], strict=True):
            self._write_large(i, target, epsilon, float(noise.sign))
        return self._in_order(large, [self._views[i] for i in self._small])

    def scores(
        self, targets: Collection[nn.Parameter], means: Mapping[nn.Parameter, Tensor], empty: Callable[[Tensor], Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ of the last sample; its product with the gradient has the mean E_q[diag ∇²f].

        Args:
            targets: Parameters to compute it for; the parameters hold θ.
            means: μ of the local parts.
            empty: Returns memory for the result of a large parameter.

        Returns:
            A tensor per parameter, shaped like it.
        """
        scores: dict[nn.Parameter, Tensor] = {}
        for i in self._large:
            if self.owners[i] not in targets:
                continue
            param, score = self._params[i], empty(self._params[i])
            for block in blocks([param]):
                part = block.join([score])
                torch.sub(block.join([param]), block.join([means[self.owners[i]]]), out=part)
                block.write_([score], part.mul_(self._precision(i, block.join([self._terms.curvatures[i]]))))
            scores[self.owners[i]] = score
        if small := [i for i in self._small if self.owners[i] in targets]:
            scores |= self._small_scores(small, means)
        return scores

    def draws(self, noise: CounterNoise, large: Sequence[Tensor], *, pooled: bool) -> list[Tensor]:
        """Draw ε up to its sign.

        Args:
            noise: Noise of the pass.
            large: Memory of the large parameters' samples, which receives their ε unless a pool is used.
            pooled: Whether antithetic noise comes from a pool.

        Returns:
            ε of the small parameters, flat, followed by ε of each large one.
        """
        pool = noise.next_pool() if pooled else None
        if pool is None:
            small = torch.empty_like(self.flat)
            noise.draw_([small, *large] if self._small else large)
            return [small, *large]
        sizes = [len(self.flat), *(self._params[i].numel() for i in self._large)]
        if self.cached_pool is None or self.cached_pool[0].counter != pool.counter:
            self.cached_pool = None  # free the old pool before the new one is allocated
            self.cached_pool = pool, pool.draw(sum(sizes), self.flat)
        return list(torch.split(pool.window(self.cached_pool[1], sum(sizes)), sizes))

    # -- the scale of the noise ---------------------------------------------------------------------------------------

    def _set_shape(self, shape: NoiseShape | None) -> None:
        self._shape = shape
        if shape is not None:
            self._small_shape = NoiseShape(*map(self._repeat, shape))
            self._factors = [number**-0.5 for number in shape.scale.tolist()] if shape.scale.is_cpu else []

    def _update_unit_std(self) -> None:
        small = torch.cat([self.flat[:0], *(self._terms.curvatures[i].reshape(-1) for i in self._small)])
        if self._shape is not None:
            unscaled = small.clamp_min_(0).add_(self._small_shape.damping)
        else:
            unscaled = precision(small, **self._terms.hyperparameters.precision_arguments)
        self._unit_precision, self._unit_std = unscaled, unscaled.rsqrt()
        self._unit_std_parts = self._split(self._unit_std)

    def _precision(self, i: int, curvature: Tensor, *, without_scale: bool = False) -> Tensor:
        """1/Σ of a block of parameter i, or τ_t/(Ñ Σ) without the scale."""
        if self._shape is None:
            return precision(curvature, **self._terms.hyperparameters.precision_arguments)
        if without_scale:
            return curvature.clamp_min(0).add_(self._shape.damping[i])
        return shaped_precision(curvature, self._shape.scale[i], self._shape.damping[i])

    # -- writing samples ----------------------------------------------------------------------------------------------

    def _write_small(self, epsilon: Tensor, sign: int) -> None:
        means = [self._params[i] for i in self._small]
        if not epsilon.is_cpu:
            std = self._unit_std
            if self._shape is not None:
                std = std * self._small_shape.scale.rsqrt()
            torch.addcmul(torch.cat([mean.view(-1) for mean in means]), epsilon, std, value=sign, out=self.flat)
            return
        factors = [float(sign) if self._shape is None else sign * self._factors[i] for i in self._small]
        torch._foreach_copy_(list(self._views.values()), means)
        torch._foreach_addcmul_(self._flat_parts, self._split(epsilon), self._unit_std_parts, factors)

    def _write_large(self, i: int, target: Tensor, epsilon: Tensor, factor: float) -> None:
        mean, curvature = self._params[i], self._terms.curvatures[i]
        has_factor = self._shape is not None and bool(self._factors)  # saves one pass over the block
        if has_factor:
            factor *= self._factors[i]
        for block in blocks([mean]):
            std = self._precision(i, block.join([curvature]), without_scale=has_factor).rsqrt_()
            part = block.join([target])  # may already hold ε
            torch.addcmul(block.join([mean]), block.join([epsilon]), std, value=factor, out=part)
            block.write_([target], part)

    def _small_scores(self, small: Sequence[int], means: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        owners = [self.owners[i] for i in small]
        scores = torch._foreach_sub([self._views[i] for i in small], [means[owner] for owner in owners])
        precisions = self._unit_precision
        if self._shape is not None:
            precisions = precisions * self._small_shape.scale
        views = self._shaped_like(precisions)
        torch._foreach_mul_(scores, [views[i] for i in small])
        return dict(zip(owners, scores, strict=True))

    # -- the flat buffer ----------------------------------------------------------------------------------------------

    def _split(self, flat: Tensor) -> list[Tensor]:
        """The part of each small parameter."""
        return list(torch.split(flat, self._sizes)) if self._small else []

    def _shaped_like(self, flat: Tensor) -> dict[int, Tensor]:
        """Views of a flat tensor, shaped like the small parameters, by index."""
        return {i: part.view(self._params[i].shape) for part, i in zip(self._split(flat), self._small, strict=True)}

    def _repeat(self, values: Tensor) -> Tensor:
        """Repeat one value per parameter, ``[params]``, for each element of the small ones."""
        return values.index_select(0, self._param_index)  # several times as fast as values[self._param_index]

    def _in_order(self, large: Sequence[Tensor], small: Sequence[Tensor]) -> list[Tensor]:
        """Values of the large and of the small parameters, merged into the order of all."""
        by_index = {**dict(zip(self._large, large, strict=True)), **dict(zip(self._small, small, strict=True))}
        return [by_index[i] for i in range(len(self._params))]
