"""Samples of cohorts, θ = μ ± σ ε, without doing anything twice that one update leaves as it was for the next.

Antithetic pairs use each ε twice, and the noise's shape u = 1/√(max(s, 0) + γ_t) changes with the curvature only. So ε is
kept from the first to the second update of a pair, and what depends on the curvature from one measurement to the next: means
for every tensor, u itself for the small ones. Neither is state: a resumed run computes both again, to the same bits.

A small model's step is hundreds of operations that each take as long to start as to run. Small tensors therefore share one
flat buffer for their ε, their u and their samples, of which the layers see views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.hyperparameters import Effective, effective
from lightning_bayes.optim.runtime.blocks import blocks
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.posteriors import Shape, noise_moments, noise_scale, precision, shaped_precision
from lightning_bayes.private_torch import version_of

SMALL = 2**16  # elements of a tensor that shares the flat buffer


class _Origin(NamedTuple):
    """What the noise of a cohort depends on, but for μ and ε."""

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
class _Cohort:
    """Memory of one cohort.

    Args:
        params: Its parameters.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = list(params)
        is_small = [param.numel() <= SMALL and param.is_contiguous() for param in params]
        self.small = [i for i, small in enumerate(is_small) if small]
        self.large = [i for i, small in enumerate(is_small) if not small]
        sizes = [params[i].numel() for i in self.small]
        self.flat = params[0].new_empty(sum(sizes))
        parts = zip(torch.split(self.flat, sizes), self.small, strict=True)
        self.views = {i: part.view(params[i].shape) for part, i in parts}
        counts, numbers = (torch.tensor(n, dtype=torch.long, device=self.flat.device) for n in (sizes, self.small))
        self.owner = numbers.repeat_interleave(counts)  # of each flat element
        self.roots = self.flat.new_tensor([param.numel() ** 0.5 for param in params])
        self.kept: tuple[tuple[int, ...], list[Tensor]] = ((), [])  # a counter and ε
        self.origin: _Origin | None = None
        self.means: tuple[Tensor, Tensor] | None = None  # mean 1/(s + γ_t), and γ_t
        self.unit = self.flat  # σ of the small tensors, but for the factor of each tensor
        self.starts = torch.empty(0)

    def fits(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether these are its parameters, where and as they were."""
        return (
            len(params) == len(self.params)
            and all(
                a is b and (i not in self.views or (self.views[i].shape == b.shape and b.is_contiguous()))
                for i, (a, b) in enumerate(zip(self.params, params, strict=True))
            )
            and params[0].device == self.flat.device
            and params[0].dtype == self.flat.dtype
        )


@final
class CohortSampler:
    """Draws the samples of an optimizer's cohorts."""

    def __init__(self) -> None:
        self._cohorts: dict[nn.Parameter, _Cohort] = {}  # by the first parameter
        self._sampled: dict[nn.Parameter, tuple[_Cohort, int, Effective, Shape | None]] = {}

    @torch.no_grad()
    def sample(
        self,
        params: Sequence[nn.Parameter],
        states: Sequence[Mapping[str, Any]],
        group: Mapping[str, Any],
        noise: CounterNoise,
        buffers: Callable[[nn.Parameter], Tensor],
        *,
        keep: bool,
    ) -> list[Tensor]:
        """A sample of each parameter.

        Args:
            params: The cohort; their values are μ.
            states: Their optimizer states.
            group: Their parameter group.
            noise: The pass's noise.
            buffers: Gives memory for a large parameter.
            keep: Whether to keep ε where the next update uses it again; it takes the memory of one more sample.

        Returns:
            The samples, in memory that the next sample overwrites.
        """
        cohort = self._cohorts.get(params[0])
        if cohort is None or not cohort.fits(params):
            cohort = self._cohorts[params[0]] = _Cohort(params)
        now = effective(group)
        shape = self._shape(cohort, states, now)
        large = [buffers(params[i]) for i in cohort.large]
        targets = [cohort.flat, *large] if cohort.small else large
        draws = _take(cohort, noise, targets, keep=keep and noise.serves_twice)
        if cohort.small:
            mean = torch.cat([params[i].view(-1) for i in cohort.small])
            std = cohort.unit if shape is None else cohort.unit * shape.scale.rsqrt()[cohort.owner]
            torch.addcmul(mean, draws[0], std, value=noise.sign, out=cohort.flat)
        for i, target, epsilon in zip(cohort.large, large, draws[-len(large) :] if large else [], strict=True):
            _write_large(target, epsilon, params[i], states[i]["curvature"], now, _at(shape, i), noise.sign)
        for i, param in enumerate(params):
            self._sampled[param] = cohort, i, now, shape
        found = {**cohort.views, **dict(zip(cohort.large, large, strict=True))}
        return [found[i] for i in range(len(params))]

    def precision(self, param: nn.Parameter, curvature: Tensor) -> Tensor:
        """1/Σ that the last sample of a parameter was drawn with.

        Args:
            param: The parameter.
            curvature: Its s.

        Returns:
            Shaped like the parameter.
        """
        _, i, now, shape = self._sampled[param]
        return _precision(curvature, now, _at(shape, i))

    def forget_draws(self) -> None:
        """Give the memory of ε back."""
        for cohort in self._cohorts.values():
            cohort.kept = (), []

    def _shape(self, cohort: _Cohort, states: Sequence[Mapping[str, Any]], now: Effective) -> Shape | None:
        """The noise's shape, see `posteriors.noise_shape`, None where the noise is that of the bound; and σ of the small."""
        stated = now.stated_damping
        is_shaped = now.relative_noise is not None
        numbers = (stated,) if is_shaped else tuple(now.precision_arguments.values())
        curvatures = [state["curvature"] for state in states]
        origin = _Origin(curvatures, [version_of(tensor) for tensor in curvatures], (is_shaped, *numbers))
        if cohort.origin is None or not cohort.origin.is_same(origin):
            cohort.origin = origin
            cohort.means = noise_moments(curvatures, stated) if is_shaped else None
            cohort.starts = torch.stack([state["scale"] for state in states])
            if cohort.small:
                small = torch.cat([curvatures[i].reshape(-1) for i in cohort.small])
                if cohort.means is None:
                    cohort.unit = precision(small, **now.precision_arguments).rsqrt_()
                else:
                    cohort.unit = small.clamp_min_(0).add_(cohort.means[1][cohort.owner]).rsqrt_()
        if cohort.means is None or now.relative_noise is None:
            return None
        inverse_means, strengths = cohort.means
        norms = torch.stack(torch._foreach_norm(list[Tensor](cohort.params)))
        sizes = torch.maximum(norms / cohort.roots, cohort.starts)  # as `posteriors.tensor_sizes`
        return Shape(noise_scale(inverse_means, sizes, now.relative_noise, now.scale), strengths)


def _at(shape: Shape | None, i: int) -> tuple[Tensor, Tensor] | None:
    return None if shape is None else (shape.scale[i], shape.damping[i])


def _precision(curvature: Tensor, now: Effective, shape: tuple[Tensor, Tensor] | None) -> Tensor:
    return precision(curvature, **now.precision_arguments) if shape is None else shaped_precision(curvature, *shape)


def _write_large(
    target: Tensor,
    epsilon: Tensor,
    mean: Tensor,
    curvature: Tensor,
    now: Effective,
    shape: tuple[Tensor, Tensor] | None,
    sign: int,
) -> None:
    for block in blocks([mean]):
        std = _precision(block.join([curvature]), now, shape).rsqrt_()
        block.write_([target], torch.addcmul(block.join([mean]), block.join([epsilon]), std, value=sign, out=std))


def _take(cohort: _Cohort, noise: CounterNoise, targets: list[Tensor], *, keep: bool) -> list[Tensor]:
    """ε of a cohort: kept ones, or new ones in the memory of the samples unless they are to be kept."""
    counter, (known, kept) = noise.counter, cohort.kept
    if known == counter:
        noise.skip()
        return kept
    if not keep:
        noise.draw_(targets)
        return targets
    drawn = kept or [torch.empty_like(target) for target in targets]
    noise.draw_(drawn)
    cohort.kept = counter, drawn
    return drawn
