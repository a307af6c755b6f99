"""Samples of all cohorts of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_bayes.optim.diagonal.cohort_noise import CohortNoise, State
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.shards import local_parts


@final
class CohortSampler:
    """Draws the samples of an optimizer's cohorts, and owns the memory they are written to."""

    def __init__(self) -> None:
        self._cohorts: dict[nn.Parameter, CohortNoise] = {}  # by the first parameter
        self._sampled: list[CohortNoise] = []  # since `start`
        self._scratch: dict[Tensor, Tensor] = {}

    def start(self) -> None:
        """Forget the samples of the last pass."""
        self._sampled.clear()

    @torch.no_grad()
    def sample(
        self,
        params: Sequence[nn.Parameter],
        states: Sequence[State],
        group: Mapping[str, Any],
        noise: CounterNoise,
        *,
        pooled: bool,
    ) -> list[Tensor]:
        """Draw a sample of each parameter of a cohort; see `CohortNoise.sample`."""
        cohort = self._cohorts.get(params[0])
        if cohort is None or not cohort.matches(params):
            cohort = self._cohorts[params[0]] = CohortNoise(params)
        self._sampled.append(cohort)
        return cohort.sample(local_parts(params, states)[1], group, noise, self.scratch, pooled=pooled)

    @torch.no_grad()
    def scores(
        self,
        params: Iterable[nn.Parameter],
        means: Mapping[nn.Parameter, Tensor],
        empty: Callable[[Tensor], Tensor],
    ) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ of the last sample; parameters without a sample are left out. See `CohortNoise.scores`."""
        targets = {param for param in params if param in means}
        scores: dict[nn.Parameter, Tensor] = {}
        for cohort in self._sampled:
            scores |= cohort.scores(targets, means, empty)
        return scores

    def scratch(self, param: Tensor) -> Tensor:
        """Scratch memory for a parameter: its sample during a pass, its step during an update.

        Args:
            param: The parameter, or its local part.

        Returns:
            A buffer shaped like it, the same one at each call until the device or dtype changes.
        """
        buffer = self._scratch.get(param)
        if buffer is None or buffer.device != param.device or buffer.dtype != param.dtype:
            buffer = self._scratch[param] = torch.empty_like(param, requires_grad=False)
        return buffer

    def forget_draws(self) -> None:
        """Release the memory of ε."""
        for cohort in self._cohorts.values():
            cohort.cached_pool = None
