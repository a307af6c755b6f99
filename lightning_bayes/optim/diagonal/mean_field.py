"""Base class of the mean-field optimizers: hyperparameters, state, sampling, the update and the posterior.

A method of the family adds three things: a pure, elementwise update of its state (`natural_update`), a curvature estimator,
and a few class attributes. `optim.diagonal.vogn` is the pattern.
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
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.diagonal.cohort import DiagonalCohort
from lightning_bayes.optim.diagonal.estimators import BatchSizeCheck, CurvatureEstimator, SquaredGradients
from lightning_bayes.optim.diagonal.parameter_state import cohorts_of, forget, record_sizes, start_state, state_fields
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
from lightning_bayes.optim.runtime.parameters import deterministic_params, reference_weights, require_sizes, trainable
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass, Measurement
from lightning_bayes.optim.runtime.shards import local_state, require_elementwise
from lightning_bayes.optim.schedules import apply_functions, take_functions
from lightning_bayes.optim.settings import plain
from lightning_bayes.optim.steps import BaseOptimizerStep, Step, make_steps, step_for
from lightning_bayes.optim.steps.base_optimizer import STATE_KEY, groups_of
from lightning_bayes.optim.weight_prior import prior_state, stated_prior_of, weight_priors
from lightning_bayes.posteriors import initial_curvature


class MeanFieldOptimizer(NoisyOptimizer, ABC):
    """A mean-field variational optimizer. Subclasses set the class attributes.

    Class attributes:
        noisy: Whether gradients are computed at posterior samples. If False, there is no posterior, only a point estimate.
        estimator: Estimates the curvature ĥ from passes.
        state_type: The state of a parameter: mean, curvature, momentum, and anything else the algorithm needs.
        default_step: The step of the method's callback if no learning rate is given.
        hyperparameters: The record of its hyperparameters.
        own_defaults: Defaults that override the record's.
        can_graft: Whether its direction can be combined with the length of another optimizer's step (`optim.steps.graft`).
        curvature_update: Pure update of s alone, used when another optimizer moves the mean. Its arguments are s, ĥ,
            ``rate`` = 1-β₂ and keyword arguments of `natural_update`. None if s needs more than ĥ.
        averages_curvature: Whether this update is the plain running average of ĥ.
        amortises: Whether updates may skip the measurement; see `optim.runtime.measuring`.
        signed_curvature: Whether the curvature may be negative, down to -δ̃.
        prior_at_sample: Whether the gradient of the prior is computed at the sample instead of the mean.

    Numeric arguments may be functions of the number of updates; see `optim.schedules`.

    Args:
        model: The model to train. A curvature rule must cover each of its layers.
        params: Parameters or parameter groups. Default: all trainable parameters of `model`.
        base: The optimizer that moves the means; see `optim.steps.base_optimizer`. It determines `params` and `lr`.
        own: The hyperparameters that the algorithm's record adds to the shared ones.
        **fields: Shared hyperparameters; see `OptimizerFields`.

    Raises:
        HyperparameterError: If a value is out of range, or no parameter is trainable.
        UnsupportedLayerError: If a lazy layer is uninitialised.
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
        arguments = {**fields, **(own or {}), **({} if base is None else {"step_rule": "user"})}
        values = self.hyperparameters.given(arguments, self.own_defaults)
        require_sizes(model)
        self._reference = reference_weights(model)
        self.steps = make_steps(base)
        step = step_for(values["step_rule"], self.steps)
        self._deterministic = deterministic_params(model, values["bayesian"], norms=step.is_published)
        self.weight_priors = weight_priors(model, values["prior"])
        accepted = signature(type(self).natural_update).parameters
        self._own_arguments = [name for name in self.hyperparameters.own_names() if name in accepted]
        self._functions: list[dict[str, Callable[[int], Any]]] = []  # scheduled hyperparameters, per group
        self._sampler = CohortSampler()
        self._check_batch_size = BatchSizeCheck(type(self).__name__) if self.estimator.depends_on_batch_size else None
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
        """The algorithm's pure, elementwise update. Its arguments are the state, ĝ, ĥ and, by keyword, hyperparameters."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group and create its state, so that a posterior always exists; see `torch.optim.Optimizer`."""
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
        """The step that moves the means of a group."""
        return self.steps[group["step_rule"]]

    @property
    def base_step(self) -> BaseOptimizerStep | None:
        """The step that uses another optimizer; None if the algorithm's own update moves the means."""
        step = self.steps.get("user")
        return step if isinstance(step, BaseOptimizerStep) else None

    def state_dict(self) -> dict[str, Any]:
        """The state, including a base optimizer's state under ``base``; see `torch.optim.Optimizer`."""
        state = super().state_dict()
        return state if self.base_step is None else {**state, STATE_KEY: self.base_step.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state.

        Args:
            state_dict: The result of `state_dict`. Its step rules replace those of this optimizer. A rule that needs a base
                optimizer raises a `HyperparameterError` if there is none.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            # Missing in files of version 0.1.0.dev0.
            group.update({"curvature_interval": 1, "antithetic": False, **group})
        rules = {group["step_rule"] for group in self.param_groups}
        if self.base_step is not None and "user" not in rules:
            self.steps = make_steps(None)
        for rule in rules:
            step_for(rule, self.steps)
        if self.base_step is not None:
            self.base_step.load_state_dict(state_dict, self.state)
        for group, param in self._trained():
            forget(self.state[param], set(self.state_type._fields[1:]) - set(self._state_fields(param, group)))

    def _state(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter, created if it does not exist."""
        state: dict[str, Any] = self.state[param]
        if not state:
            fields, reference = self._state_fields(param, group), self._reference.get(param, param)
            state |= start_state(param, fields, reference, noisy=param not in self._deterministic)
            state |= prior_state(param, group, self.weight_priors)
            if not fields and self.estimator.quantity == "squared_gradients":
                self.engine.left_out.add(param)
        return state

    def _state_fields(self, param: nn.Parameter, group: Mapping[str, Any]) -> Sequence[str]:
        """Names of the tensors in a parameter's state."""
        return state_fields(
            self.state_type,
            updates_mean=self.step_of(group).uses_update,
            is_deterministic=param in self._deterministic,
            needs_momentum=not self.averages_curvature and self.curvature_update is None,
        )

    def _open_capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        if loss_scale != 1 and not self.estimator.allows_loss_scale:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} measures {self.estimator.quantity} through BackPACK, which supports no scaled loss, "
                "such as that of a torch.amp.GradScaler or of precision='16-mixed'. Train with precision='32-true'."
            )
        needs_engine = self._measures_now() and self.estimator.quantity != "gradient"
        return super()._open_capture(sample, loss_scale) if needs_engine else self._unmeasured_capture()

    def _measures_now(self) -> bool:
        """Whether the passes of the open update measure any curvature. The first pass decides for all of them."""
        if self._open.measures is None:
            states = ((self._state(param, group), group) for group, param in self._trained())
            is_due = any(self._since(state, group) for state, group in states if "curvature" in state)
            self._open.measures = is_due or self.measures_always
        return self._open.measures

    def _measured_params(self) -> list[nn.Parameter]:
        return [param for group, param in self._trained() if "curvature" in self._state(param, group)]

    def _since(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> int:
        """Number of updates for which a measurement in this update would account; 0 if the parameter is not due."""
        return updates_since(state["step"] + 1, self.num_updates + 1, group["curvature_interval"])

    def _read_pass(self, finished: FinishedPass) -> Curvature:
        params = self._measured_params()
        curvature = self.estimator.read(finished, params, self._scores) if self._measures_now() else {}
        if self.prior_at_sample:
            for group, param in self._trained():
                finished.add_prior_of_noise_(param, stated_prior_of(group, self.state[param]))
        return curvature

    def _join_ranks(self, curvature: Curvature, num_examples: float, add_ranks: Callable[[list[Tensor]], None]) -> None:
        self.estimator.join_ranks(curvature, num_examples, self._measured_params(), add_ranks)

    def _finalise_curvature(self, curvature: Curvature) -> Curvature:
        return super()._finalise_curvature(self.estimator.finalise(curvature)) if self._measures_now() else {}

    def _scores(self, params: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """(θ - μ) / Σ of the open pass, in the engine's workspace."""
        return self._sampler.scores(params, self.sampled_mean(), lambda p: self.engine.workspace.result(p.shape, p))

    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        self._sampler.start()
        sample: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            for params in self._noisy_cohorts(group):
                states = [self.state[param] for param in params]
                drawn = self._sampler.sample(params, states, group, noise, pooled=self._uses_pool(group))
                sample.update(zip(params, drawn, strict=True))
        if self._open.measures is not False and self.estimator.quantity != "gradient":
            self._sampler.forget_draws()  # to make room for the engine's workspace
        elif self._open.measures is False:
            self.engine.workspace.release()  # to make room for the pool of draws
        return sample

    def _uses_pool(self, group: Mapping[str, Any]) -> bool:
        """Whether passes share a pool of draws: not if other draws come in between, or the engine needs the memory."""
        is_amortised = group["curvature_interval"] > 1 and self.num_updates >= FIRST
        return self.mc_samples == 1 and (is_amortised or self.estimator.quantity == "gradient")

    def _noisy_cohorts(self, group: dict[str, Any]) -> Iterator[list[nn.Parameter]]:
        """Cohorts of the parameters to sample, with an initialised curvature."""
        if group["noisy"]:
            effective(group)  # raises if N is unknown
            for cohort in self._cohorts(group):
                params = [param for param in cohort if self.state[param]["noisy"]]
                if params and self._start_curvature(params, group):
                    yield params

    def _cohorts(self, group: dict[str, Any]) -> list[list[nn.Parameter]]:
        """The trainable parameters of a group, split into cohorts that are updated together."""
        return cohorts_of(group["params"], lambda param: self._state(param, group))

    def _start_curvature(self, params: list[nn.Parameter], group: dict[str, Any]) -> bool:
        """Initialise the curvature from ``init_precision`` before the first update. Returns whether there is a curvature."""
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
            effective(group)  # raises if N is unknown
            for params in self._cohorts(group):
                self.step_of(group).apply(self._cohort(params, group, measurement))
        for step in self.steps.values():
            step.finish(self.param_groups, self.state)
        self._finish_update(measurement)
        if self._check_batch_size is not None:
            self._check_batch_size(measurement, self.param_groups[0])

    def _finish_update(self, measurement: Measurement) -> None:
        """Record the tensor sizes after a measurement, count the update, and evaluate the schedules."""
        for group, functions in zip(self.param_groups, self._functions, strict=True):
            if measurement.has_curvature and group["relative_noise"]:
                for params in self._cohorts(group):
                    record_sizes(params, [self.state[param] for param in params])
            before = effective(group)
            group["step"] += 1
            apply_functions(group, functions, self.hyperparameters)
            after = effective(group)
            if self.signed_curvature and (after.prior < before.prior or after.scale > before.scale):
                keep_all_positive_([local_state(self.state[param]) for param in group["params"]], group)

    def _cohort(self, params: list[nn.Parameter], group: dict[str, Any], measurement: Measurement) -> DiagonalCohort:
        """The cohort of `params` at this update, which it counts."""
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
            arguments=lambda deltas: self._update_arguments(group, self.state[params[0]]["step"], deltas),
            curvature_update=type(self).curvature_update,
            only_averages=self.averages_curvature,
            buffer=self._sampler.scratch,
        )

    def _update_arguments(self, group: dict[str, Any], step: int, precision: Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of `natural_update`; `precision` is δ of each weight, if it differs from the group's."""
        hyper = effective(group)
        return {
            "lr": float(group["lr"]),
            "betas": group["betas"],
            "prior": hyper.prior if precision is None else hyper.prior_of(precision),
            "damping": hyper.damping,
            "step": step,
            **{name: group[name] for name in self._own_arguments},
        }

    def _start_noise(self) -> None:
        """Initialise the curvature of all groups that have an ``init_precision``."""
        for group in self.param_groups:
            list(self._noisy_cohorts(group))

    @torch.no_grad()
    def posterior(self) -> WeightPosterior:
        """Build the posterior, by the model's parameter names. Under FSDP2 all processes must call it together.

        Returns:
            Copies of mean and precision; deterministic parameters are among the constants.
        """
        self._start_noise()
        return posterior_of_model(self.model, self._trained(), self.state)

    @torch.no_grad()
    def effective_parameters(self) -> Tensor:
        """The effective number of parameters, Σ_i s_i / (s_i + γ_t), that the data determine (MacKay 1992).

        γ_t is the prior's part of the curvature (`posteriors.shaped_noise`), or δ̃. Negative curvatures count as 0. A matrix
        with Kronecker factors contributes the diagonal of their product.

        Returns:
            A scalar between 0 and the number of weights with noise.
        """
        counts = list(self._determined())
        return torch.stack(counts).sum() if counts else torch.zeros(())

    def _determined(self) -> Iterator[Tensor]:
        """The effective number of parameters of each tensor."""
        for group in self.param_groups:
            params = [param for cohort in self._cohorts(group) for param in cohort] if group["noisy"] else []
            for param in params:
                state = self.state[param]
                if state["step"] and state["noisy"]:
                    yield determined_of(group, state, param)
