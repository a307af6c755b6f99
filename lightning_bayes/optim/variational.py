"""Base class of the optimizers that join a posterior family, a curvature estimator and a step.

The family (`optim.diagonal.family`, `optim.kronecker.family`) samples the weights and updates the posterior. A mean-field
method adds three things: a pure, elementwise update of its state (`natural_update`), a curvature estimator, and a few class
attributes. `optim.diagonal.vogn` is the pattern.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.curvature import Capture, make_engine
from lightning_bayes.curvature.parameters import require_full_precision, rows_without_gradient
from lightning_bayes.errors import UnsupportedTrainingError
from lightning_bayes.optim.diagonal.estimators import BatchSizeCheck, CurvatureEstimator, SquaredGradients
from lightning_bayes.optim.diagonal.family import DiagonalFamily
from lightning_bayes.optim.diagonal.signed_curvature import keep_all_positive_
from lightning_bayes.optim.diagonal.state import MeanFieldState, start_state
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.family import PosteriorFamily
from lightning_bayes.optim.groups import KEY, SHARED, flat
from lightning_bayes.optim.hyperparameters import Hyperparameters, OptimizerFields, StepRule
from lightning_bayes.optim.measuring import BASE_INTERVAL, require_interval
from lightning_bayes.optim.noise import CounterNoise
from lightning_bayes.optim.optimizer import NoisyOptimizer
from lightning_bayes.optim.parameters import (
    deterministic_params,
    reference_weights,
    require_initialised,
    trainable,
)
from lightning_bayes.optim.passes import Curvature, FinishedPass, Measurement
from lightning_bayes.optim.readout import WeightPosterior, effective_parameters, posterior_of_model
from lightning_bayes.optim.resuming import RECORD, require_same
from lightning_bayes.optim.schedules import apply_schedules, take_schedules
from lightning_bayes.optim.settings import plain
from lightning_bayes.optim.steps import BaseOptimizerStep, Step, make_steps, step_for
from lightning_bayes.optim.steps.base_optimizer import PRIOR_PRECISION, STATE_KEY
from lightning_bayes.optim.steps.decay import decay_kind
from lightning_bayes.optim.weight_prior import prior_state, stated_prior_of, weight_priors


class VariationalOptimizer(NoisyOptimizer, ABC):
    """A variational optimizer with independent weights, or another `PosteriorFamily`. Subclasses set the class attributes.

    Class attributes:
        noisy: Whether gradients are computed at posterior samples. If False, there is no posterior, only a point estimate.
        estimator: Estimates the curvature ĥ from passes.
        state_type: The state of a parameter: mean, curvature, momentum, and anything else the algorithm needs.
        default_step: The step of the method's callback if no learning rate is given.
        hyperparameters: The record of its hyperparameters.
        own_defaults: Defaults that override the record's.
        curvature_update: Pure update of s alone, used when another optimizer moves the mean. Its arguments are s, ĥ,
            ``rate`` = 1-β₂ and keyword arguments of `natural_update`. None if s needs more than ĥ.
        averages_curvature: Whether this update is the plain running average of ĥ.
        amortises: Whether updates may skip the measurement; see `optim.measuring`.
        signed_curvature: Whether the curvature may be negative, down to -δ̃.
        prior_at_sample: Whether the gradient of the prior is computed at the sample instead of the mean.

    Numeric arguments may be functions of the number of updates; see `optim.schedules`.

    Args:
        model: The model to train. A curvature rule must cover each of its layers.
        params: Parameters or parameter groups, or another optimizer, whose list of groups is then shared: its ``lr``,
            ``weight_decay`` and schedulers apply, but its other entries do not; so a scheduler that cycles Adam's ``betas``
            does not change this optimizer's. Default: all trainable parameters of `model`.
        base: The optimizer that moves the means; see `optim.steps.base_optimizer`. The list of its groups is shared. An L2
            ``weight_decay`` stays its own, and gives the prior's precision, δ = Ñ·wd/τ.
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
    signed_curvature: ClassVar[bool] = False
    prior_at_sample: ClassVar[bool] = False
    default_step: ClassVar[StepRule] = "user"
    hyperparameters: ClassVar[type[Hyperparameters]] = Hyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | torch.optim.Optimizer | None = None,
        *,
        base: torch.optim.Optimizer | None = None,
        own: Mapping[str, Any] | None = None,
        **fields: Unpack[OptimizerFields],
    ) -> None:
        arguments: dict[str, Any] = {**fields, **(own or {})}
        self._states_precision = "prior_precision" in arguments
        if base is not None:
            arguments = {**self._defaults_with_base(arguments), **arguments, "step_rule": "user"}
        values = self.hyperparameters.given(arguments, self.own_defaults)
        require_initialised(model)
        self._reference = reference_weights(model)
        self._rows_without_noise = {
            p: mask.nonzero()[:, 0].tolist() for p, mask in rows_without_gradient(model).items()
        }
        self.steps = make_steps(base)
        step = step_for(values["step_rule"], self.steps)
        self.deterministic = deterministic_params(model, values["bayesian"], norms=step.is_published)
        self.weight_priors = weight_priors(model, values["prior"])
        accepted = signature(type(self).natural_update).parameters
        self._own_arguments = [name for name in self.hyperparameters.own_names() if name in accepted]
        self._schedules: list[dict[str, Callable[[int], Any]]] = []  # of each group, by hyperparameter
        self.uses_engine = self.estimator.quantity != "gradient"  # in passes that measure
        self.family = self._make_family(weakref.proxy(self))  # weak, to free all tensors with the last reference
        self._check_batch_size = None if self.estimator.is_linear else BatchSizeCheck(type(self).__name__)
        if params is None:
            params = trainable(model) if base is None else base
        engine, quantity, reduction = values["engine"], self.estimator.quantity, values["loss_reduction"]
        if base is not None and reduction == "auto":
            reduction = "auto_or_mean"  # the noise of this step does not depend on the scale of the curvature
        settings = self.hyperparameters.group_values(values)
        if values["radius"] != "sgd":
            del settings["momentum"]
        super().__init__(  # calls add_param_group, which needs the attributes above
            model,
            make_engine(engine, model, reduction, values["workspace_mib"], quantity=quantity),
            params,
            {**settings, "noisy": self.noisy, "noise_seed": values["seed"]},
            mc_samples=values["mc_samples"],
            max_nonfinite_steps=values["max_nonfinite_steps"],
        )

    def _defaults_with_base(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults if another optimizer moves the means: the curvature is measured less often, and no prior is implied."""
        states_prior = self._states_precision or arguments.get("prior_mean", "zero") != "zero"
        interval = BASE_INTERVAL if self.amortises else 1
        return {"prior_precision": PRIOR_PRECISION, "prior_on_mean": states_prior, "curvature_interval": interval}

    def _make_family(self, optimizer: VariationalOptimizer) -> PosteriorFamily:
        """The posterior family of `optimizer`, a weak reference to this one. Subclasses may choose another family."""
        return DiagonalFamily(optimizer)

    @staticmethod
    @abstractmethod
    def natural_update(*arguments: Any, **hyperparameters: Any) -> Any:
        """The algorithm's pure, elementwise update. Its arguments are the state, ĝ, ĥ and, by keyword, hyperparameters."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group and create its state, so that a posterior always exists; see `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        self._start_group(self.param_groups[-1])
        self.family.check_groups()

    def _start_group(self, group: dict[str, Any]) -> None:
        """Check a group's settings, take its schedules, and create the state of its parameters."""
        settings = group.setdefault(KEY, dict(self.posterior_defaults))
        if self.groups_owner is not None:
            settings["decay"] = decay_kind(self.groups_owner, group, states_precision=self._states_precision)
        self._schedules.append(take_schedules(group, self.hyperparameters))
        settings.update(plain(settings))
        if self.groups_owner is None:
            group.update(plain({name: group[name] for name in SHARED if name in group}))
        self.hyperparameters.check(plain(flat(group)), complete=True)
        step = step_for(settings["step_rule"], self.steps)
        if settings["antithetic"] is None:
            settings["antithetic"] = not step.is_published
        require_interval(type(self).__name__, settings["curvature_interval"], amortises=self.amortises)
        require_full_precision(group["params"])
        for param in group["params"]:
            self._start_state(param, group)

    def start_groups(self) -> None:
        """Give settings and state to groups and parameters that others have added to the list of groups."""
        for group in self.param_groups:
            if KEY not in group:
                self._start_group(group)
                self.family.check_groups()
            for param in group["params"]:
                self._start_state(param, group)
        while len(self._schedules) < len(self.param_groups):  # a callback has restored groups
            self._schedules.append({name: value for name, value in self.posterior_defaults.items() if callable(value)})

    def step_of(self, group: Mapping[str, Any]) -> Step:
        """The step that moves the means of a group."""
        return self.steps[group["posterior"]["step_rule"]]

    @property
    def base_step(self) -> BaseOptimizerStep | None:
        """The step that uses another optimizer; None if the algorithm's own update moves the means."""
        step = self.steps.get("user")
        return step if isinstance(step, BaseOptimizerStep) else None

    @property
    def _fills_gradients(self) -> bool:
        return self.base_step is None  # torch's optimizers leave a parameter without a gradient alone

    def state_dict(self) -> dict[str, Any]:
        """The state, with a base optimizer's own under ``base``; see `torch.optim.Optimizer`."""
        state = {**super().state_dict(), RECORD: self._record()}
        if self.base_step is None:
            return state
        base = self.base_step.base.state_dict()
        return {**state, STATE_KEY: {name: value for name, value in base.items() if name != "param_groups"}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of the same algorithm, step, groups and base optimizer; see `optim.resuming`."""
        require_same(state_dict, self._record())
        super().load_state_dict(state_dict)
        if self.base_step is not None:
            self.base_step.base.load_state_dict({**state_dict[STATE_KEY], "param_groups": state_dict["param_groups"]})

    def _record(self) -> dict[str, Any]:
        """What a state must agree with to be loaded; see `optim.resuming`."""
        names = {param: name for name, param in self.model.named_parameters()}
        groups = [
            [names.get(param, str(tuple(param.shape))) for param in group["params"]] for group in self.param_groups
        ]
        return {
            "algorithm": type(self).__name__,
            "step": self.posterior_defaults["step_rule"],
            "base": type(self.base_step.base).__name__ if self.base_step else None,
            "groups": groups,
            "posterior": sorted(
                names[param]
                for group in self.param_groups
                for param in group["params"]
                if self.noisy and param in names and param not in self.deterministic
            ),
        }

    def _start_state(self, param: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Create the state of a parameter unless it exists."""
        state = self.state[param]
        if not state:
            fields = self.family.state_fields(param, group)
            reference = self._reference.get(param, param)
            state |= start_state(param, fields, reference, noisy=param not in self.deterministic)
            state |= prior_state(param, group, self.weight_priors)
            state |= self.family.counters
            if param in self._rows_without_noise:
                state["rows_without_noise"] = self._rows_without_noise[param]
            if not fields and self.estimator.quantity == "squared_gradients":
                self.engine.left_out.add(param)  # a parameter without curvature is not measured

    def _measured_shapes(self) -> Mapping[Hashable, Tensor]:
        """What the passes of the open update measure, decided once per update; see `PosteriorFamily`."""
        if self._open_update.measured_shapes is None:
            self._open_update.measured_shapes = self.family.measured_shapes(always=self._open_update.always_measures)
        return self._open_update.measured_shapes

    def _capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        if loss_scale != 1 and not self.estimator.allows_loss_scale:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} measures {self.estimator.quantity} through BackPACK, which supports no scaled loss, "
                "such as that of a torch.amp.GradScaler or of precision='16-mixed'. Train with precision='32-true'."
            )
        if self._measured_shapes() and self.uses_engine:
            return self.family.capture(sample, loss_scale)
        self.engine.workspace.release()  # its memory is free for the model until the next measurement
        return self._gradient_capture()

    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        shapes = self._open_update.measured_shapes
        return self.family.sample(noise, measures_curvature=None if shapes is None else bool(shapes))

    def _read_pass(self, finished: FinishedPass) -> Curvature:
        curvature: Curvature = {}
        if self._measured_shapes():
            curvature = self.estimator.read(finished, self._measured_params(), self.family.scores)
        if self.prior_at_sample:
            for group, param in self.trained():
                finished.add_prior_at_sample_(param, stated_prior_of(group, self.state[param]))
        return curvature

    @property
    def _reads_count(self) -> bool:
        if not self.estimator.reads_count:
            return False
        states = (self.state[param] for param in self._measured_params())
        return any(not (state["noisy"] and state["step"]) for state in states)

    def _measured_params(self) -> list[nn.Parameter]:
        return [key for key in self._measured_shapes() if isinstance(key, nn.Parameter)]

    def _join_ranks(self, curvature: Curvature, num_examples: float, add_ranks: Callable[[list[Tensor]], None]) -> None:
        self.estimator.join_ranks(curvature, num_examples, self._measured_params(), add_ranks)

    def _finalise_curvature(self, curvature: Curvature) -> Curvature:
        if not self._measured_shapes():
            return {}
        if not self.estimator.is_linear:
            curvature = self.estimator.finalise(curvature, self.param_groups)
        return {
            key: curvature[key] if key in curvature else torch.zeros_like(like)
            for key, like in self._measured_shapes().items()
        }

    def _update_all(self, measurement: Measurement) -> None:
        for group in self.param_groups:
            effective(group)  # raises if N is unknown, before anything changes
        for group in self.param_groups:
            self.store_initial_values(group)
        for update in self.family.updates(measurement):
            self.step_of(update.group).apply(update)
        for step in self.steps.values():
            step.finish(self.param_groups, self.state)
        for group, schedules in zip(self.param_groups, self._schedules, strict=True):
            self._count_update(group, schedules)
        self.family.refresh(measured=bool(measurement.curvature))
        if self._check_batch_size is not None:
            self._check_batch_size(measurement, self.param_groups[0])

    def _count_update(self, group: dict[str, Any], schedules: dict[str, Callable[[int], Any]]) -> None:
        """Count the update and evaluate the schedules."""
        before = effective(group)
        group["posterior"]["step"] += 1
        if schedules:
            apply_schedules(group, schedules, self.hyperparameters)
        after = effective(group)
        if self.signed_curvature and (after.prior < before.prior or after.scale > before.scale):
            keep_all_positive_([self.state[param] for param in group["params"]], group)

    def store_initial_values(self, group: dict[str, Any]) -> None:
        """Store what an algorithm derives from a group's hyperparameters at its first update. Called before every update."""
        return

    def update_arguments(self, group: dict[str, Any], step: int, precision: Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of `natural_update`. Subclasses extend them.

        Args:
            group: The parameter group.
            step: Index of the parameter's update, from 1.
            precision: δ of each weight, if it differs from the group's.

        Returns:
            The arguments by name.
        """
        hyper = effective(group)
        return {
            "lr": float(group["lr"]),
            "betas": group["posterior"]["betas"],
            "prior": hyper.prior if precision is None else hyper.prior_of(precision),
            "damping": hyper.damping,
            "step": step,
            **{name: group[KEY][name] for name in self._own_arguments},
        }

    def set_num_data(self, num_data: int) -> None:
        """Set N in all groups, and in those added later; its effect on the prior and the noise follows."""
        for settings in (self.posterior_defaults, *(group["posterior"] for group in self.param_groups)):
            settings["num_data"] = num_data
        for group in self.param_groups:
            self.hyperparameters.check(plain(flat(group)))
        self.refresh_noise()

    @torch.no_grad()
    def refresh_noise(self) -> None:
        """Store the covariance of the noise anew, after a change of settings between two measurements."""
        if self.signed_curvature:
            for group in self.param_groups:
                keep_all_positive_([self.state[param] for param in group["params"]], group)
        self.family.refresh(measured=False, always=True)

    @torch.no_grad()
    def posterior(self) -> WeightPosterior:
        """Build the posterior, by the model's parameter names.

        Returns:
            Copies of mean and precision; deterministic parameters are among the constants.
        """
        self.family.start_curvature()
        return posterior_of_model(self.model, self.trained(), self.state)

    @torch.no_grad()
    def effective_parameters(self) -> Tensor:
        """The effective number of parameters, Σ_i s_i / (s_i + γ_t), that the data determine (MacKay 1992).

        γ_t is the prior's part of the curvature (`posteriors.shaped_noise`), or δ̃. Negative curvatures count as 0. A matrix
        with Kronecker factors contributes the diagonal of their product.

        Returns:
            A scalar between 0 and the number of weights with noise.
        """
        self.family.start_curvature()
        counts = [effective_parameters(group, self.state[param]) for group, param in self.trained()]
        known = [count for count in counts if count is not None]
        return torch.stack(known).sum() if known else torch.zeros(())
