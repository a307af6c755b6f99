"""The diagonal family: q(θ) = N(μ, diag Σ); `optim.covariance.diagonal` has its covariance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_bayes.curvature import Capture
from lightning_bayes.optim.covariance import diagonal as covariance
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.finished_pass import UpdateMeasurement
from lightning_bayes.optim.measuring import elapsed_updates, weight_of_old
from lightning_bayes.optim.noise import CounterNoise
from lightning_bayes.optim.posterior_family import PosteriorFamily
from lightning_bayes.optim.steps import CohortUpdate
from lightning_bayes.optim.variational import VariationalOptimizer
from lightning_bayes.posteriors import initial_curvature

Group: TypeAlias = dict[str, Any]


@final
class DiagonalFamily(PosteriorFamily):
    """Independent weights; `excluded` returns the parameters that belong to another family."""

    def __init__(
        self, optimizer: VariationalOptimizer, excluded: Callable[[], Collection[nn.Parameter]] = lambda: ()
    ) -> None:
        self._optimizer, self._excluded = optimizer, excluded
        self.kept_draws: tuple[tuple[int, ...], dict[nn.Parameter, Tensor]] | None = None  # for the antithetic twin

    def state_fields(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        """Names of the tensors in a parameter's state."""
        optimizer = self._optimizer
        fields: Sequence[str] = optimizer.state_type._fields[1:]
        if optimizer.steps[group["posterior"]["step_rule"]].uses_natural_update:
            return fields
        if param in optimizer.deterministic:
            return ()
        updates_curvature_alone = optimizer.averages_curvature or optimizer.curvature_update is not None
        return ("curvature",) if updates_curvature_alone else fields

    def _params(self, group: Group, *, noisy: bool = False) -> list[nn.Parameter]:
        """The trained parameters of a group in this family, or those to sample: with a posterior, once s is known."""
        excluded = self._excluded()
        params = [param for param in group["params"] if param.requires_grad and param not in excluded]
        if not noisy:
            return params
        if not group["posterior"]["noisy"]:
            return []
        effective(group)  # raises if N is unknown
        states, has_start = self._optimizer.state, group["posterior"]["init_precision"] is not None
        return [param for param in params if states[param]["noisy"] and (has_start or states[param]["step"])]

    @override
    def capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        states = self._optimizer.state
        left_out = {p for _, p in self._optimizer.trained() if "curvature" not in states[p]}
        return self._optimizer.engine.capture(left_out=left_out)

    def to_measure(self, *, always: bool = False) -> dict[Hashable, Tensor]:
        """All parameters with a curvature, if the measurement of any is due."""
        states, update = self._optimizer.state, self._optimizer.num_updates + 1
        params, is_due = dict[Hashable, Tensor](), always
        for group in self._optimizer.param_groups:
            interval = group["posterior"]["curvature_interval"]
            for param in self._params(group):
                if "curvature" in states[param]:
                    params[param] = param
                    is_due = is_due or elapsed_updates(states[param]["step"] + 1, update, interval) > 0
        return params if is_due else {}

    @torch.no_grad()
    @override
    def sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        params = list[nn.Parameter]()
        for group in self._optimizer.param_groups:
            params += (noisy := self._params(group, noisy=True))
            if group["posterior"]["init_precision"] is not None:
                self._start(noisy, group)
        if not params:
            return {}
        draws = self._draws(noise, params)
        states = [self._optimizer.state[param] for param in params]
        return dict(
            zip(params, covariance.sample([p.detach() for p in params], states, draws, noise.sign), strict=True)
        )

    def _draws(self, noise: CounterNoise, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """ε without its sign; draws of one sample an update are kept for the antithetic twin, which forgets them."""
        counter, kept = noise.counter, self.kept_draws
        self.kept_draws = None
        if kept is not None and kept[0] == counter and all(param in kept[1] for param in params):
            draws = [kept[1][param] for param in params]
            if all(a.shape == b.shape and a.device == b.device for a, b in zip(draws, params, strict=True)):
                noise.skip()
                return draws
        draws = [torch.empty_like(param, requires_grad=False) for param in params]
        noise.draw_(draws)
        if noise.has_twin and self._optimizer.mc_samples == 1:
            self.kept_draws = counter, dict(zip(params, draws, strict=True))
        return draws

    @torch.no_grad()
    def scores(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ of the open pass; its product with the gradient has the mean E_q[diag ∇²f]."""
        means = self._optimizer.stashed_means()
        sampled = [param for param in params if param in means]
        if not sampled:
            return {}
        scores = torch._foreach_sub([param.detach() for param in sampled], [means[param] for param in sampled])
        torch._foreach_mul_(scores, covariance.precisions([self._optimizer.state[param] for param in sampled]))
        return dict(zip(sampled, scores, strict=True))

    def start_curvature(self) -> None:
        """Initialise the curvature before the first update."""
        for group in self._optimizer.param_groups:
            if group["posterior"]["init_precision"] is not None and group["posterior"]["noisy"]:
                self._start(self._params(group, noisy=True), group)

    def _start(self, params: Sequence[nn.Parameter], group: Group) -> None:
        """Start parameters without an update at the group's ``init_precision``."""
        new = [param for param in params if not self._optimizer.state[param]["step"]]
        if not new:
            return
        start = initial_curvature(group["posterior"]["init_precision"], **effective(group).start_arguments)
        states = [self._optimizer.state[param] for param in new]
        for state in states:
            state["curvature"].fill_(start)
        covariance.refresh(group, new, states)

    def updates(self, measurement: UpdateMeasurement) -> Iterator[DiagonalUpdate]:
        """Prepare an update for the parameters of a group that have the same kind of state."""
        states, update = self._optimizer.state, self._optimizer.num_updates + 1
        for group in self._optimizer.param_groups:
            settings = group["posterior"]
            interval, beta = settings["curvature_interval"], settings["betas"][1]
            starts_as_mean = not self._optimizer.steps[settings["step_rule"]].is_published
            kinds: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
            for param in self._params(group):
                state = states[param]
                kind = state["step"], "curvature" in state, "prior_precision" in state
                kinds.setdefault(kind, []).append(param)
            for (step, has_curvature, _), params in kinds.items():
                is_measured = measurement.curvature and has_curvature
                elapsed = elapsed_updates(step + 1, update, interval) if is_measured else 0
                measured = [measurement.curvature[param] for param in params] if elapsed else []
                if has_curvature and settings["init_precision"] is not None:
                    self._start(params, group)
                elif measured and not step:
                    torch._foreach_copy_([states[param]["curvature"] for param in params], measured)
                for param in params:
                    states[param]["step"] += 1
                    if "measurements" in states[param]:
                        states[param]["measurements"] += elapsed
                of_params = [states[param] for param in params]
                # Without a count, updates between two measurements count too; see `optim.measuring`.
                count = of_params[0].get("measurements", step + 1)
                weight = weight_of_old(beta, count, elapsed, starts_as_mean=starts_as_mean) if elapsed else 1.0
                yield DiagonalUpdate(self._optimizer, params, of_params, group, measured, weight, measurement.summed)

    @torch.no_grad()
    def refresh(self, *, measured: bool, always: bool = False) -> None:
        """Store the covariance of the parameters whose curvature has changed."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            interval, shaped = group["posterior"]["curvature_interval"], effective(group).relative_noise is not None
            params = []
            for param in self._params(group, noisy=True):
                state, elapsed = optimizer.state[param], 0
                if measured and "curvature" in state:
                    elapsed = elapsed_updates(state["step"], optimizer.num_updates, interval)
                is_due = elapsed and covariance.is_refreshed(state["step"], elapsed, shaped=shaped)
                if always or "scale" not in state or is_due:
                    params.append(param)
            if params:
                covariance.refresh(group, params, [optimizer.state[param] for param in params])


@cache
def _argument_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


@final
@dataclass(eq=False)
class DiagonalUpdate(CohortUpdate):
    """Applies a method's pure update to parameters of a group in the same state."""

    optimizer: VariationalOptimizer
    params: Sequence[nn.Parameter]
    states: Sequence[dict[str, Any]]
    group: dict[str, Any]
    measured: Sequence[Tensor]
    weight_of_old: float  # of the curvature in its average with `measured`
    summed: float = 1.0

    @cached_property
    def _arguments(self) -> Mapping[str, Any]:
        """The keyword arguments of the update with the group's δ."""
        return self.optimizer.update_arguments(self.group, self.states[0]["step"])

    def prior_weights(self) -> float | Sequence[Tensor]:
        """δ̃, for each weight if every weight has its own prior."""
        if "prior_precision" in self.states[0]:
            return [self._arguments_of(state)["prior"] for state in self.states]
        return float(self._arguments["prior"]) if effective(self.group).stated_prior else 0.0

    @override
    def move_(self) -> None:
        for param, state in zip(self.params, self._new_states({}), strict=True):
            param.copy_(state)

    def propose_(self, lr: float) -> list[Tensor]:
        """Update the state and return the changes of the means."""
        return [mean - param for param, mean in zip(self.params, self._new_states({"lr": lr}), strict=True)]

    @override
    def average_(self) -> None:
        if not self.measured:
            return
        curvatures = [state["curvature"] for state in self.states]
        curvature_update = self.optimizer.curvature_update
        if self.optimizer.averages_curvature:
            torch._foreach_lerp_(curvatures, list(self.measured), 1 - self.weight_of_old)
        elif curvature_update is None:  # the full update, whose changes of the means are discarded
            self._new_states({})
        else:
            accepted = _argument_names(curvature_update)
            for state, measured in zip(self.states, self.measured, strict=True):
                arguments = {name: value for name, value in self._arguments_of(state).items() if name in accepted}
                new = curvature_update(state["curvature"], measured, rate=1 - self.weight_of_old, **arguments)
                if new is not state["curvature"]:
                    state["curvature"].copy_(new)

    def _arguments_of(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keyword arguments for a parameter, with δ̃ of each weight if every weight has its own prior."""
        precision = state.get("prior_precision")
        if precision is None:
            return self._arguments
        return self.optimizer.update_arguments(self.group, self.states[0]["step"], precision)

    def _new_states(self, replaced: Mapping[str, Any]) -> list[Tensor]:
        """Run the update of each parameter with some arguments `replaced`; store the states and return the means."""
        betas, means = (self._arguments["betas"][0], self.weight_of_old), []
        update, state_type = self.optimizer.natural_update, self.optimizer.state_type
        for i, (param, state) in enumerate(zip(self.params, self.states, strict=True)):
            # Updates assume a prior centred at zero, so they get the distance from its mean.
            centre = state.get("prior_mean")
            start = param.detach() if centre is None else param.detach() - centre
            old = state_type(start, *(state[name] for name in state_type._fields[1:]))
            # Averaging s with itself does not change it.
            measured = self.measured[i] if self.measured else state["curvature"]
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            new = update(old, grad, measured, **{**self._arguments_of(state), "betas": betas, **replaced})
            means.append(new.mean if centre is None else new.mean + centre)
            for name, value in zip(state_type._fields[1:], new[1:], strict=True):
                state[name].copy_(value)  # the new state may share memory with the mean
        return means
