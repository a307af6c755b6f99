"""The diagonal family: q(θ) = N(μ, diag Σ), in cohorts of parameters that are sampled and updated together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Capture
from lightning_bayes.optim.diagonal.cohort_noise import CohortNoise
from lightning_bayes.optim.diagonal.cohort_update import DiagonalUpdate
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.runtime.family import PosteriorFamily
from lightning_bayes.optim.runtime.measuring import FIRST_UPDATES, elapsed_updates
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.passes import Measurement
from lightning_bayes.posteriors import initial_curvature

if TYPE_CHECKING:
    from lightning_bayes.optim.variational import VariationalOptimizer

Group: TypeAlias = dict[str, Any]


class _CachedNoise(NamedTuple):
    layout: list[tuple[Any, ...]]  # identity and memory layout of the parameters
    noise: CohortNoise


@final
class DiagonalFamily(PosteriorFamily):
    """Independent weights.

    Args:
        optimizer: The optimizer.
        excluded: Returns the parameters that belong to another family.
    """

    def __init__(
        self, optimizer: VariationalOptimizer, excluded: Callable[[], Collection[nn.Parameter]] = lambda: ()
    ) -> None:
        self._optimizer, self._excluded = optimizer, excluded
        self._noises: dict[nn.Parameter, _CachedNoise] = {}  # by the first parameter of the cohort
        self._sampled: list[CohortNoise] = []  # in the last pass
        self._scratch: dict[Tensor, Tensor] = {}

    def cohorts(self, group: Group) -> list[list[nn.Parameter]]:
        """Split the trainable parameters of a group into cohorts that are updated together.

        Args:
            group: The group.

        Returns:
            The cohorts. Their parameters share device, dtype and number of updates. All or none of them have a curvature,
            and all or none have a prior for each weight.
        """
        excluded, cohorts = self._excluded(), dict[Any, list[nn.Parameter]]()
        for param in group["params"]:
            if param.requires_grad and param not in excluded:
                state = self._optimizer.state[param]
                key = (param.device, param.dtype, state["step"], "curvature" in state, "prior_precision" in state)
                cohorts.setdefault(key, []).append(param)
        return list(cohorts.values())

    def state_fields(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        """Names of the tensors in a parameter's state; see `PosteriorFamily`."""
        optimizer = self._optimizer
        fields: Sequence[str] = optimizer.state_type._fields[1:]
        if optimizer.step_of(group).uses_natural_update:
            return fields
        if param in optimizer.deterministic:
            return ()
        updates_curvature_alone = optimizer.averages_curvature or optimizer.curvature_update is not None
        return ("curvature",) if updates_curvature_alone else fields

    # -- passes -------------------------------------------------------------------------------------------------------

    def capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """The engine's capture; see `PosteriorFamily`."""
        return self._optimizer.engine.capture()

    def measured_shapes(self, *, always: bool = False) -> dict[Hashable, Tensor]:
        """All parameters with a curvature, if the measurement of any is due; see `PosteriorFamily`."""
        states, shapes, is_due = self._optimizer.state, dict[Hashable, Tensor](), always
        for group in self._optimizer.param_groups:
            for params in self.cohorts(group):
                if "curvature" in states[params[0]]:
                    shapes.update(zip(params, params, strict=True))
                    is_due |= self._elapsed(states[params[0]], group) > 0
        return shapes if is_due else {}

    @torch.no_grad()
    def sample(self, noise: CounterNoise, *, measures_curvature: bool | None) -> dict[nn.Parameter, Tensor]:
        """Draw a sample; see `PosteriorFamily`."""
        self._sampled.clear()
        sample: dict[nn.Parameter, Tensor] = {}
        for group in self._optimizer.param_groups:
            for params in self._noisy_cohorts(group):
                self.start_cohort(params, group)
                cohort_noise = self._noise_of(params)
                self._sampled.append(cohort_noise)
                pooled = self._uses_pool(group)
                values = cohort_noise.sample(
                    [self._optimizer.state[param] for param in params], group, noise, self.scratch, pooled=pooled
                )
                sample.update(zip(params, values, strict=True))
        if measures_curvature is False:
            self._optimizer.engine.workspace.release()  # to make room for the pool of draws
        elif self._optimizer.uses_engine:
            self.forget_draws()  # to make room for the engine's workspace
        return sample

    @torch.no_grad()
    def scores(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ of the open pass, in the engine's workspace; see `CohortNoise.scores`."""
        means, workspace = self._optimizer.stashed_means(), self._optimizer.engine.workspace
        targets = {param for param in params if param in means}
        scores: dict[nn.Parameter, Tensor] = {}
        for noise in self._sampled:
            scores |= noise.scores(targets, means, lambda param: workspace.result(param.shape, param))
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
        """Release the memory of the draws."""
        for cached in self._noises.values():
            cached.noise.cached_pool = None

    def _noise_of(self, params: Sequence[nn.Parameter]) -> CohortNoise:
        layout = [(id(p), p.device, p.dtype, p.shape, p.is_contiguous()) for p in params]
        if params[0] not in self._noises or self._noises[params[0]].layout != layout:
            self._noises[params[0]] = _CachedNoise(layout, CohortNoise(params))
        return self._noises[params[0]].noise

    def _uses_pool(self, group: Group) -> bool:
        """Whether passes share a pool of draws: not if other draws come in between, or the engine needs the memory."""
        optimizer = self._optimizer
        is_amortised = group["posterior"]["curvature_interval"] > 1 and optimizer.num_updates >= FIRST_UPDATES
        return optimizer.mc_samples == 1 and (is_amortised or not optimizer.uses_engine)

    def _noisy_cohorts(self, group: Group) -> list[list[nn.Parameter]]:
        """Cohorts of the parameters to sample: all with a posterior, once a curvature is known."""
        if not group["posterior"]["noisy"]:
            return []
        effective(group)  # raises if N is unknown
        states, cohorts = self._optimizer.state, self.cohorts(group)
        noisy = [[param for param in params if states[param]["noisy"]] for params in cohorts]
        has_start = group["posterior"]["init_precision"] is not None
        return [params for params in noisy if params and (has_start or states[params[0]]["step"])]

    # -- curvature ----------------------------------------------------------------------------------------------------

    def start_curvature(self) -> None:
        """Initialise the curvature before the first update; see `PosteriorFamily`."""
        for group in self._optimizer.param_groups:
            for params in self._noisy_cohorts(group):
                self.start_cohort(params, group)

    def start_cohort(
        self, params: Sequence[nn.Parameter], group: Group, measured: Sequence[Tensor] | None = None
    ) -> None:
        """Initialise the curvature of a cohort; does nothing after the first update.

        Args:
            params: The cohort.
            group: Its group. Its ``init_precision``, if set, determines the curvature.
            measured: ĥ of each parameter, the initial curvature without an ``init_precision``.
        """
        states = [self._optimizer.state[param] for param in params]
        if states[0]["step"]:
            return
        if group["posterior"]["init_precision"] is not None:
            start = initial_curvature(group["posterior"]["init_precision"], **effective(group).start_arguments)
            for state in states:
                state["curvature"].fill_(start)
        elif measured is not None:
            torch._foreach_copy_([state["curvature"] for state in states], list(measured))

    def _elapsed(self, state: Mapping[str, Any], group: Group) -> int:
        """Number of updates since the previous measurement; 0 if this update does not measure the parameter."""
        return elapsed_updates(
            state["step"] + 1, self._optimizer.num_updates + 1, group["posterior"]["curvature_interval"]
        )

    # -- the update ---------------------------------------------------------------------------------------------------

    def updates(self, measurement: Measurement) -> Iterator[DiagonalUpdate]:
        """Prepare the update of every cohort; see `PosteriorFamily`."""
        for group in self._optimizer.param_groups:
            for params in self.cohorts(group):
                yield self._cohort_update(params, group, measurement)

    def _cohort_update(self, params: list[nn.Parameter], group: Group, measurement: Measurement) -> DiagonalUpdate:
        states = [self._optimizer.state[param] for param in params]
        curvatures = [state["curvature"] for state in states if "curvature" in state]
        elapsed = self._elapsed(states[0], group) if measurement.curvature and curvatures else 0
        measured = curvatures  # averaging s with itself does not change it
        if elapsed:
            measured = [measurement.curvature[param].contiguous() for param in params]
        if curvatures:
            self.start_cohort(params, group, measured)
        for state in states:
            state["step"] += 1
            if "measurements" in state:
                state["measurements"] += elapsed
        return DiagonalUpdate(self._optimizer, params, states, group, measured, self.scratch, elapsed)
