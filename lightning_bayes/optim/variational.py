"""Base class of the optimizers that join a posterior family, a curvature estimator and a step.

The family samples the weights and updates the posterior. A method adds a pure update, an estimator and class attributes.
"""

from __future__ import annotations

import weakref
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.curvature import Capture, GradientEngine, make_engine
from lightning_bayes.curvature.parameters import require_full_precision
from lightning_bayes.optim.base_optimizer import BaseOptimizerStep, defaults_with_base, make_steps, step_for
from lightning_bayes.optim.default_noise import DefaultNoise
from lightning_bayes.optim.diagonal.batch_square import BatchSizeCheck, BatchSquare
from lightning_bayes.optim.diagonal.estimators import CurvatureEstimator, SquaredGradients
from lightning_bayes.optim.diagonal.signed_curvature import keep_all_positive_
from lightning_bayes.optim.diagonal.state import MeanFieldState
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.finished_pass import BarePass, Curvature, FinishedPass, UpdateMeasurement
from lightning_bayes.optim.group_settings import GroupSettings
from lightning_bayes.optim.groups import KEY, apart, beside
from lightning_bayes.optim.hyperparameters import DeclaresArguments, OptimizerFields, StepRule
from lightning_bayes.optim.measuring import FIRST_UPDATES
from lightning_bayes.optim.optimizer import NoisyOptimizer
from lightning_bayes.optim.parameters import StartingStates, trainable
from lightning_bayes.optim.posterior_family import PosteriorFamily
from lightning_bayes.optim.readout import WeightPosterior, effective_parameters, posterior_of_model
from lightning_bayes.optim.resuming import RECORD, record_of, require_same
from lightning_bayes.optim.weight_prior import stated_prior_of


class VariationalOptimizer(DeclaresArguments, NoisyOptimizer, ABC):
    """A variational optimizer with independent weights, or another `PosteriorFamily`. Subclasses set the class attributes.

    Class attributes:
        noisy: Whether gradients are computed at posterior samples. If False, there is no posterior, only a point estimate.
        family_type: The posterior family, built with a weak reference to the optimizer. Those of arguments are inherited.
        state_type: The state of a parameter: mean, curvature, momentum, and anything else the algorithm needs.
        default_step: The step of the method's callback if no learning rate is given.
        curvature_update: Update of s from s, ĥ, ``rate`` = 1-β₂ and arguments of `natural_update`, which may change s and ĥ
            in place; None for none.
        averages_curvature: Whether this update is the plain running average of ĥ.
        signed_curvature: Whether the curvature may be negative, down to -δ̃.
        prior_at_sample: Whether the gradient of the prior is computed at the sample instead of the mean.

    Args:
        model: The model to train. A curvature rule must cover each of its layers.
        params: Parameters or parameter groups, or another optimizer, whose list of groups is then shared: its ``lr``,
            ``weight_decay`` and schedulers apply, but not its ``betas``. Default: all trainable parameters of `model`.
        base: The optimizer that moves the means; see `optim.base_optimizer`. The list of its groups is shared. Its L2
            ``weight_decay`` gives the prior's precision. ``curvature_interval`` and the noise default to the callbacks'.
        **fields: See `OptimizerFields`; numbers may be functions of the number of updates (`optim.schedules`).

    Raises:
        HyperparameterError: If a value is out of range, or no parameter is trainable.
        UnsupportedLayerError: If a lazy layer is uninitialised.
        UnsupportedTrainingError: If parameters are stored in half precision.
    """

    noisy: ClassVar[bool]
    family_type: ClassVar[Any]
    estimator: CurvatureEstimator = SquaredGradients()
    state_type: ClassVar[Any] = MeanFieldState
    curvature_update: ClassVar[Callable[..., Tensor] | None] = None
    averages_curvature: ClassVar[bool] = False
    signed_curvature: ClassVar[bool] = False
    prior_at_sample: ClassVar[bool] = False
    default_step: ClassVar[StepRule] = "user"

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | torch.optim.Optimizer | None = None,
        *,
        base: torch.optim.Optimizer | None = None,
        **fields: Unpack[OptimizerFields],
    ) -> None:
        arguments: dict[str, Any] = dict(fields)
        self._states_precision, self.fills_gradients = "prior_precision" in arguments, base is None
        self._default_noise: DefaultNoise | None = None
        if base is not None:
            if "relative_noise" not in arguments:
                self._default_noise = DefaultNoise(arguments.get("noise_flatness"))
            arguments = {**defaults_with_base(arguments, amortises=self.amortises), **arguments}
        declaration, self.steps = self.declaration(), make_steps(base)
        self.arguments = values = declaration.completed(arguments, self.own_defaults)
        self.check_together(values)
        self.configure(model, values)
        norms, prior = step_for(values["step_rule"], self.steps).is_published, values["prior"]
        self._starting = StartingStates(model, bayesian=values["bayesian"], prior=prior, norms=norms)
        self.deterministic, self.weight_priors = self._starting.deterministic, self._starting.weight_priors
        self._own_arguments = self.arguments_of_update()
        self._settings = GroupSettings(declaration, self.check_together, self.steps)
        self._build_family()
        squares = isinstance(self.estimator, BatchSquare)
        self._check_batch_size = BatchSizeCheck(type(self).__name__) if squares else None
        engine, quantity, reduction = values["engine"], self.estimator.quantity, values["loss_reduction"]
        if base is not None and reduction == "auto":  # the noise of this step does not depend on the curvature's scale
            reduction = "auto_or_mean"
        settings = declaration.group_values(values)
        if values["radius"] != "sgd":
            del settings["momentum"]
        self._gradient_engine = GradientEngine(model, reduction)
        super().__init__(  # calls add_param_group, which needs the attributes above
            model,
            make_engine(engine, model, reduction, values["workspace_mib"], quantity=quantity),
            params if params is not None else base if base is not None else trainable(model),
            {**settings, **self.group_state, "noisy": self.noisy, "noise_seed": values["seed"]},
            mc_samples=values["mc_samples"],
            max_nonfinite_steps=values["max_nonfinite_steps"],
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group and create its state, so that a posterior always exists."""
        super().add_param_group(param_group)
        self._start_group(self.param_groups[-1])

    def _start_group(self, group: dict[str, Any]) -> None:
        """Check a group's settings, take its schedules, and create the state of its parameters."""
        self._settings.start(group, self.posterior_defaults, self.groups_owner, states_precision=self._states_precision)
        require_full_precision(group["params"])
        for param in (param for param in group["params"] if not self.state[param]):
            self._start_state(param, group)
        self.family.check_groups()

    def start_groups(self) -> None:
        """Give settings and state to groups and parameters that others have added to the list of groups."""
        for group in self.param_groups:
            if KEY not in group:
                self._start_group(group)
            for param in group["params"]:
                if not self.state[param]:
                    self._start_state(param, group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore attributes; the family has no state of its own."""
        super().__setstate__(state)
        self._build_family()

    def _build_family(self) -> None:
        self.family: PosteriorFamily = self.family_type(weakref.proxy(self))  # frees all tensors with us
        self.draw_sample = self.family.sample

    @property
    def base_step(self) -> BaseOptimizerStep | None:
        """The step that uses another optimizer; None if the algorithm's own update moves the means."""
        return cast(BaseOptimizerStep | None, self.steps.get("user"))

    def state_dict(self) -> dict[str, Any]:
        """The state; that of a user's optimizer stands where it would load it."""
        return beside(self.groups_owner, {**super().state_dict(), RECORD: self._record()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of the same algorithm, step, groups and base optimizer; see `optim.resuming`."""
        require_same(state_dict, self._record())
        ours, theirs = apart(self.notes.load(state_dict))
        super().load_state_dict(ours)
        self._settings.follow(self.param_groups[0], self.posterior_defaults)
        if self.base_step is not None:
            self.base_step.base.load_state_dict(theirs)

    def _record(self) -> dict[str, Any]:
        """What a state must agree with to be loaded; see `optim.resuming`."""
        step_rule, base = self.posterior_defaults["step_rule"], self.base_step.base if self.base_step else None
        return record_of(self, step_rule, base, self.deterministic if self.noisy else None)

    def _start_state(self, param: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Create the state of a parameter."""
        fields = self.family.state_fields(param, group)
        self.state[param] |= {**self._starting.new(param, group, fields), **self.family.counters}

    def capture_pass(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture | BarePass]:
        """The family's capture if the update measures, else one of the gradient, bare if no count is needed."""
        if loss_scale != 1:
            self.estimator.require_scalable_loss(type(self).__name__)
        update = self._open_update
        if update.to_measure is None:
            update.to_measure = self.family.to_measure(always=update.always_measures)
        if update.to_measure and self.estimator.quantity != "gradient":
            return self.family.capture(sample, loss_scale)
        needs_no_count = update.is_only_batch and self.notes.is_mean and self.num_updates >= FIRST_UPDATES
        if self.estimator.reads_count:  # for parameters without noise
            states = [self.state[key] for key in update.to_measure or () if isinstance(key, nn.Parameter)]
            needs_no_count = needs_no_count and all(state["noisy"] and state["step"] for state in states)
        return nullcontext(BarePass()) if needs_no_count else self._gradient_engine.capture()

    def read_pass(self, finished: FinishedPass) -> Curvature:
        """Read ĥ of a pass, and add the prior's gradient at the sample."""
        curvature: Curvature = {}
        for table, row in finished.padding_rows().items() if finished.captured.paddings else ():
            if table in self.state:
                self.state[table].setdefault("rows_without_noise", [row])
        if self._open_update.to_measure:
            measured = [key for key in self._open_update.to_measure if isinstance(key, nn.Parameter)]
            curvature = self.estimator.read(finished, measured, self.family.scores)
        for group, param in self.trained() if self.prior_at_sample else ():
            if (mean := finished.means.get(param)) is not None:
                term = (param.detach() - mean).mul_(stated_prior_of(group, self.state[param]))
                weights = self._open_update.weights(finished.captured, self.mc_samples)
                finished.add_to_gradient_(param, self._open_update.prior_term(param, term, weights))
        return curvature

    def _update_all(self, measurement: UpdateMeasurement) -> None:
        before = list(map(effective, self.param_groups))  # raises if N is unknown, before anything changes
        if measurement.summed > self.param_groups[0][KEY].get("loss_examples", 1.0):
            self._settings.set(self.param_groups, loss_examples=measurement.summed)
        for group in (group for group in self.param_groups if not group[KEY]["step"]):
            self.store_initial_values(group)
        for update in self.family.updates(measurement):
            self.steps[update.group[KEY]["step_rule"]].apply(update)
        for step in self.steps.values():
            step.finish(self.param_groups, self.state)
        for group in self.param_groups:
            group[KEY]["step"] += 1
        if self._settings.have_schedules:
            self._settings.apply_schedules(self.param_groups, self.posterior_defaults)
        for group, old in zip(self.param_groups, before if self.signed_curvature else (), strict=False):
            if (new := effective(group)).prior < old.prior or new.scale > old.scale:
                keep_all_positive_(self.state, group)
        self.family.refresh(measured=bool(measurement.curvature))
        if measurement.curvature and not self.family.to_measure():
            self.engine.workspace.release()  # its memory is free for the model until the next measurement
        if self._default_noise is not None:
            self._default_noise.apply(self, self.notes.classifies)
        if self._check_batch_size is not None:
            self._check_batch_size(measurement, self.param_groups[0])

    def store_initial_values(self, group: dict[str, Any]) -> None:
        """Store what an algorithm derives from a group's hyperparameters, before the group's first update."""

    def update_arguments(self, group: dict[str, Any], step: int, precision: Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of `natural_update` at a parameter's update `step`; `precision` is δ where it has its own."""
        hyper = effective(group)
        return {
            "lr": float(group["lr"]),
            "prior": hyper.prior if precision is None else hyper.prior_of(precision),
            "damping": hyper.damping,
            "step": step,
            **{name: group[KEY][name] for name in ("betas", *self._own_arguments)},
        }

    def set_num_data(self, num_data: int) -> None:
        """Set N in all groups, and in those added later; its effect on the prior and the noise follows."""
        self.posterior_defaults["num_data"] = num_data
        self._settings.set(self.param_groups, num_data=num_data)
        self.refresh_noise()

    @torch.no_grad()
    def refresh_noise(self) -> None:
        """Store the covariance of the noise anew, after a change of settings between two measurements."""
        if self.signed_curvature:
            for group in self.param_groups:
                keep_all_positive_(self.state, group)
        self.family.refresh(measured=False, always=True)

    @torch.no_grad()
    def posterior(self) -> WeightPosterior:
        """The posterior by the model's parameter names, as copies; deterministic parameters are among the constants."""
        self.family.start_curvature()
        return posterior_of_model(self.model, self.trained(), self.state, self.notes.known_likelihood)

    @torch.no_grad()
    def effective_parameters(self) -> Tensor:
        """The effective number of parameters, Σ_i s_i / (s_i + γ_t), that the data determine (MacKay 1992).

        γ_t is the prior's part of the curvature, or δ̃. A matrix contributes the diagonal of its Kronecker product.

        Returns:
            A scalar between 0 and the number of weights with noise.
        """
        self.family.start_curvature()
        return effective_parameters(self.trained(), self.state)
