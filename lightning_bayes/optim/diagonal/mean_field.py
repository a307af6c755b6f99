"""The base of the mean-field optimizers: hyperparameters, state (s, m), noise from the old s, the posterior.

Every update is a pure function of one parameter's state and measurement: the paper's, `natural_update`, or the bounded
one of `optim.steps.trust_region`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.curvature import Capture, make_engine
from lightning_bayes.curvature.parameters import require_full_precision
from lightning_bayes.curvature.spread import local
from lightning_bayes.optim.diagonal.cohort import DiagonalCohort
from lightning_bayes.optim.diagonal.estimators import BatchSizeCheck, CurvatureEstimator, SquaredGradients
from lightning_bayes.optim.diagonal.parameter_state import cohorts_of, forget, start_state, take_sizes
from lightning_bayes.optim.diagonal.sampling import CohortSampler
from lightning_bayes.optim.diagonal.signed_curvature import keep_all_positive_
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.hyperparameters import Hyperparameters, OptimizerFields, StepRule
from lightning_bayes.optim.readout.live import determined_of, posterior_of_model
from lightning_bayes.optim.readout.state import WeightPosterior
from lightning_bayes.optim.runtime.base import NoisyOptimizer
from lightning_bayes.optim.runtime.measuring import FIRST, require_interval, updates_since
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.parameters import points, reference_weights, require_sizes, trainable
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass, Measurement
from lightning_bayes.optim.runtime.shards import local_state, require_elementwise
from lightning_bayes.optim.schedules import apply_functions, take_functions
from lightning_bayes.optim.settings import plain
from lightning_bayes.optim.steps import BaseOptimizerStep, Step, make_steps, step_for
from lightning_bayes.optim.steps.base_optimizer import STATE_KEY, groups_of
from lightning_bayes.optim.weight_prior import prior_state, stated_prior_of, weight_priors
from lightning_bayes.posteriors import initial_curvature


class MeanFieldOptimizer(NoisyOptimizer, ABC):
    """A mean-field variational optimizer; subclasses fill in the class attributes.

    Class attributes:
        noisy: Whether gradients are taken at samples; False leaves a point, no posterior.
        estimator: The curvature that its passes measure, ĥ.
        state_type: Its state: mean, curvature, momentum, and what else the algorithm keeps.
        default_step: The step of its callback without a learning rate.
        hyperparameters: The record of its hyperparameters.
        own_defaults: Its defaults, where they differ from the record's.
        can_graft: Whether another optimizer's step may take its direction, see `optim.steps.graft`.
        curvature_update: Its pure update of s alone, for other optimizers' steps: of s, ĥ, ``rate`` = 1-β₂, and keyword
            arguments of `natural_update`. None where s needs more than ĥ.
        averages_curvature: Whether that is the running average of what is measured, and nothing more.
        amortises: Whether some updates may go without a measurement, see `optim.runtime.measuring`.
        signed_curvature: Whether its curvature may be negative, above -δ̃.
        prior_at_sample: Whether the prior's gradient is taken at the sample, not at the mean.

    Numbers among the arguments may be functions of the number of updates, see `optim.schedules`.

    Args:
        model: The model whose passes are measured; its layers must be reached by a curvature rule.
        params: Parameters or parameter groups, by default all trainable parameters of `model`.
        base: The optimizer that moves the means, see `optim.steps.base_optimizer`: `params` and `lr` are then its own.
        own: Hyperparameters of the algorithm alone, those that its `hyperparameters` add.
        **fields: Hyperparameters, see `OptimizerFields`.

    Raises:
        HyperparameterError: If a value lies outside of its range, or no parameter is trainable.
        UnsupportedLayerError: If a lazy layer has no size yet.
        UnsupportedTrainingError: If parameters are stored in half precision.
    """

    noisy: ClassVar[bool]
    estimator: ClassVar[CurvatureEstimator] = SquaredGradients()
    state_type: ClassVar[Any] = MeanFieldState
    curvature_update: ClassVar[Callable[..., Tensor] | None] = None
    averages_curvature: ClassVar[bool] = False
    amortises: ClassVar[bool] = False
    can_graft: ClassVar[bool] = True
    signed_curvature: ClassVar[bool] = False
    prior_at_sample: ClassVar[bool] = False
    default_step: ClassVar[StepRule] = "user"
    hyperparameters: ClassVar[type[Hyperparameters]] = Hyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        base: torch.optim.Optimizer | BaseOptimizerStep | None = None,
        own: Mapping[str, Any] | None = None,
        **fields: Unpack[OptimizerFields],
    ) -> None:
        given = {**fields, **(own or {}), **({} if base is None else {"step_rule": "user"})}
        values = self.hyperparameters.given(given, self.own_defaults)
        require_sizes(model)
        self._reference = reference_weights(model)
        self.steps = make_steps(base)
        step = step_for(values["step_rule"], self.steps)
        self._points = points(model, values["bayesian"], norms=step.is_published)
        self.weight_priors = weight_priors(model, values["prior"])
        taken = signature(type(self).natural_update).parameters
        self._own_arguments = [name for name in self.hyperparameters.own_names() if name in taken]
        self._functions: list[dict[str, Callable[[int], Any]]] = []  # of each group
        self._sampler = CohortSampler()
        self._check_batch_size = BatchSizeCheck(self.estimator, type(self).__name__)
        if params is None:
            params = groups_of(step.base) if isinstance(step, BaseOptimizerStep) else trainable(model)
        engine, quantity = values["engine"], self.estimator.quantity
        super().__init__(
            model,
            make_engine(engine, model, values["loss_reduction"], values["workspace_mib"], quantity=quantity),
            params,
            {**self.hyperparameters.group_values(values), "noisy": self.noisy, "noise_seed": values["seed"]},
            mc_samples=values["mc_samples"],
            max_nonfinite_steps=values["max_nonfinite_steps"],
        )

    @staticmethod
    @abstractmethod
    def natural_update(*arguments: Any, **hyperparameters: Any) -> Any:
        """The algorithm's pure, elementwise update: of its state, ĝ and ĥ, with hyperparameters as keywords."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer` does, and create its state, so that a posterior always exists.

        Args:
            param_group: The group.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._functions.append(take_functions(group, self.hyperparameters))
        group.update(plain(group))
        self.hyperparameters.check(group, complete=True)
        step = step_for(group["step_rule"], self.steps)
        if group["antithetic"] is None:
            group["antithetic"] = not step.is_published
        require_interval(type(self).__name__, group["curvature_interval"], amortises=self.amortises)
        step.add_group(group, len(self.param_groups))
        require_full_precision(group["params"])
        if self._is_spread:
            require_elementwise(group)
        for param in group["params"]:
            self._state(param, group)

    def step_of(self, group: Mapping[str, Any]) -> Step:
        """How the means of a group move."""
        return self.steps[group["step_rule"]]

    @property
    def base_step(self) -> BaseOptimizerStep | None:
        """The step of the optimizer that moves the means; None where the algorithm's own update does."""
        step = self.steps.get("user")
        return step if isinstance(step, BaseOptimizerStep) else None

    def state_dict(self) -> dict[str, Any]:
        """The state, see `torch.optim.Optimizer`; under ``base`` that of the optimizer that moves the means."""
        found = super().state_dict()
        return found if self.base_step is None else {**found, STATE_KEY: self.base_step.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state.

        Args:
            state_dict: The result of `state_dict`. Its step rules count: a `HyperparameterError` names those that lack
                their base optimizer.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            # Files of version 0.1.0.dev0 lack these.
            group.update({"curvature_interval": 1, "antithetic": False, **group})
        rules = {group["step_rule"] for group in self.param_groups}
        if self.base_step is not None and "user" not in rules:
            self.steps = make_steps(None)
        for rule in rules:
            step_for(rule, self.steps)
        if self.base_step is not None:
            self.base_step.load_state_dict(state_dict, self.state)
        for group, param in self._trained():
            forget(self.state[param], set(self.state_type._fields[1:]) - set(self._kept(param, group)))

    def _state(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            kept, reference = self._kept(param, group), self._reference.get(param, param)
            state |= start_state(param, kept, reference, noisy=param not in self._points)
            state |= prior_state(param, group, self.weight_priors)
            if not kept and self.estimator.quantity == "squared_gradients":
                self.engine.left_out.add(param)
        return state

    def _kept(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        """The entries of a parameter's state: none where it has no posterior and another optimizer moves it."""
        moves, averages = self.step_of(group).uses_update, self.averages_curvature or self.curvature_update is not None
        kept: Sequence[str] = self.state_type._fields[1:] if moves or not averages else ("curvature",)
        return () if param in self._points and not moves else kept

    def _open_capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        self.estimator.prepare(type(self).__name__, loss_scale)
        needs_engine = self._measures_now() and self.estimator.quantity != "gradient"
        return super()._open_capture(sample, loss_scale) if needs_engine else self._unmeasured_capture()

    def _measures_now(self) -> bool:
        """Whether the passes of the open update measure the curvature of any parameter, as the first of them decides."""
        if self._open.measures is None:
            states = ((self._state(param, group), group) for group, param in self._trained())
            is_due = any(self._since(state, group) for state, group in states if "curvature" in state)
            self._open.measures = is_due or self.measures_always
        return self._open.measures

    def _measured_params(self) -> list[nn.Parameter]:
        return [param for group, param in self._trained() if "curvature" in self._state(param, group)]

    def _since(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> int:
        """For how many updates a measurement of this one stands; 0 where the parameter is not due."""
        return updates_since(state["step"] + 1, self.num_updates + 1, group["curvature_interval"])

    def _read_pass(self, finished: FinishedPass) -> Curvature:
        params = self._measured_params()
        curvature = self.estimator.read(finished, params, self._scores) if self._measures_now() else {}
        for group, param in self._trained() if self.prior_at_sample else ():
            finished.add_prior_of_noise_(param, stated_prior_of(group, self.state[param]))
        return curvature

    def _join_ranks(self, curvature: Curvature, num_examples: float, add_ranks: Callable[[list[Tensor]], None]) -> None:
        self.estimator.join_ranks(curvature, num_examples, self._measured_params(), add_ranks)

    def _finalise_curvature(self, curvature: Curvature) -> Curvature:
        return super()._finalise_curvature(self.estimator.finalise(curvature)) if self._measures_now() else {}

    def _scores(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ of the open pass, in the engine's memory."""
        return self._sampler.scores(params, self.sampled_mean(), lambda p: self.engine.workspace.result(p.shape, p))

    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        self._sampler.start()
        sample: dict[nn.Parameter, Tensor] = {}
        runs_engine = self._open.measures is not False and self.estimator.quantity != "gradient"
        for group in self.param_groups:
            for params in self._noisy_cohorts(group):
                states = [self.state[param] for param in params]
                drawn = self._sampler.sample(params, states, group, noise, pooled=self._takes_pool(group))
                sample.update(zip(params, drawn, strict=True))
        if runs_engine:
            self._sampler.forget_draws()  # the engine needs the memory
        elif self._open.measures is False:
            self.engine.workspace.release()  # the pool of draws needs it
        return sample

    def _takes_pool(self, group: Mapping[str, Any]) -> bool:
        """Whether passes share pools of draws: not where others between them would draw, or need the memory."""
        is_amortised = group["curvature_interval"] > 1 and self.num_updates >= FIRST
        return self.mc_samples == 1 and (is_amortised or self.estimator.quantity == "gradient")

    def _noisy_cohorts(self, group: dict[str, Any]) -> Iterator[list[nn.Parameter]]:
        """Cohorts of the parameters that have noise now, their curvature started."""
        if group["noisy"]:
            effective(group)  # N must be known
            for cohort in self._cohorts(group):
                params = [param for param in cohort if self.state[param]["noisy"]]
                if params and self._start_curvature(params, group):
                    yield params

    def _cohorts(self, group: dict[str, Any]) -> list[list[nn.Parameter]]:
        """The group's trainable parameters that are updated together."""
        return cohorts_of(group["params"], lambda param: self._state(param, group))

    def _start_curvature(self, params: list[nn.Parameter], group: dict[str, Any]) -> bool:
        """Put in the initial precision before the first update; whether there is a curvature."""
        if self.state[params[0]]["step"]:
            return True
        if group["init_precision"] is None:
            return False
        start = initial_curvature(group["init_precision"], **effective(group).start_arguments)
        for param in params:
            self.state[param]["curvature"].fill_(start)
        return True

    def _update_all(self, measurement: Measurement) -> None:
        for group in self.param_groups:
            effective(group)  # N must be known
            for params in self._cohorts(group):
                self.step_of(group).apply(self._cohort(params, group, measurement))
        for step in self.steps.values():
            step.finish(self.param_groups, self.state)
        self._finish_update(measurement)
        self._check_batch_size(measurement, self.param_groups[0])

    def _finish_update(self, measurement: Measurement) -> None:
        """Take the sizes that the noise has until the next measurement, and count the update."""
        for group, functions in zip(self.param_groups, self._functions, strict=True):
            if measurement.has_curvature and group["relative_noise"] is not None:
                for params in self._cohorts(group):
                    take_sizes(params, [self.state[param] for param in params])
            before = effective(group)
            group["step"] += 1
            apply_functions(group, functions, self.hyperparameters)
            now = effective(group)
            if self.signed_curvature and (now.prior < before.prior or now.scale > before.scale):
                keep_all_positive_([local_state(self.state[param]) for param in group["params"]], group)

    def _cohort(self, params: list[nn.Parameter], group: dict[str, Any], measurement: Measurement) -> DiagonalCohort:
        """Parameters that are updated together, this update counted."""
        states = [self.state[param] for param in params]
        curvatures = [local(state["curvature"]) for state in states if "curvature" in state]
        since = self._since(states[0], group) if measurement.has_curvature and curvatures else 0
        measured = self._measured_curvature(params, group, measurement) if since else curvatures
        if curvatures and not self._start_curvature(params, group):
            torch._foreach_copy_(curvatures, measured)
        for state in states:
            state["step"] += 1
        return self._diagonal_cohort(params, group, measured, since)

    def _measured_curvature(
        self, params: list[nn.Parameter], group: dict[str, Any], measurement: Measurement
    ) -> list[Tensor]:
        """ĥ of `params`, contiguous."""
        return self.estimator.scaled([measurement.curvature[param].contiguous() for param in params], group)

    def _diagonal_cohort(
        self, params: list[nn.Parameter], group: dict[str, Any], measured: list[Tensor], since: int = 1
    ) -> DiagonalCohort:
        return DiagonalCohort(
            params,
            [self.state[param] for param in params],
            group,
            measured,
            since,
            update=type(self).natural_update,
            state_type=self.state_type,
            arguments=lambda own: self._update_arguments(group, self.state[params[0]]["step"], own),
            curvature_update=type(self).curvature_update,
            only_averages=self.averages_curvature,
            buffer=self._sampler.scratch,
        )

    def _update_arguments(self, group: dict[str, Any], step: int, precision: Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of `natural_update`, of weights with δ of their own if given; subclasses may add some."""
        now = effective(group)
        return {
            "lr": float(group["lr"]),
            "betas": group["betas"],
            "prior": now.prior if precision is None else now.prior_of(precision),
            "damping": now.damping,
            "step": step,
            **{name: group[name] for name in self._own_arguments},
        }

    def _start_noise(self) -> None:
        """Start the curvature where `init_precision` says it."""
        for group in self.param_groups:
            list(self._noisy_cohorts(group))

    @torch.no_grad()
    def posterior(self) -> WeightPosterior:
        """The posterior by the model's parameter names; under FSDP2 all processes have to call it together.

        Returns:
            Copies of mean and precision; parameters without noise are among the constants.
        """
        self._start_noise()
        return posterior_of_model(self.model, self._trained(), self.state)

    @torch.no_grad()
    def effective_parameters(self) -> Tensor:
        """The number of parameters that the data determine, Σ_i s_i / (s_i + γ_t), as in MacKay 1992.

        γ_t is what the prior adds to the curvature (`posteriors.shaped_noise`), or δ̃. Negative curvatures count as 0, and
        of a matrix with Kronecker factors the diagonal counts.

        Returns:
            A scalar between 0 and the number of weights with noise.
        """
        found = list(self._determined())
        return torch.stack(found).sum() if found else torch.zeros(())

    def _determined(self) -> Iterator[Tensor]:
        """The number of parameters that the data determine, tensor by tensor."""
        for group in (group for group in self.param_groups if group["noisy"]):
            for param in (param for params in self._cohorts(group) for param in params):
                state = self.state[param]
                if state["step"] and state["noisy"]:
                    yield determined_of(group, state, param)
