"""What the mean-field optimizers share: hyperparameters, state (s, m), noise from the old s, the posterior.

Every update is a pure function of one parameter's state and measurement: the paper's, `natural_update`, or the bounded
one of `optim.steps.trust_region`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bayes.curvature import make_engine
from lightning_bayes.optim.diagonal.measures import engine_quantity
from lightning_bayes.optim.diagonal.measuring import MeasuringOptimizer
from lightning_bayes.optim.diagonal.state import MeanFieldState, debiased
from lightning_bayes.optim.hyperparameters import (
    Hyperparameters,
    OptimizerFields,
    StepRule,
    apply_functions,
    effective,
    take_functions,
)
from lightning_bayes.optim.runtime.blocks import blocks
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.parameters import (
    points,
    reference_weights,
    require_full_precision,
    require_sizes,
    trainable,
)
from lightning_bayes.optim.settings import plain
from lightning_bayes.optim.steps import trust_region
from lightning_bayes.optim.steps.base_optimizer import UserStep, add_prior_gradient_, check_base, groups_of
from lightning_bayes.posteriors import (
    Entry,
    WeightPosterior,
    initial_curvature,
    noise_floor,
    posterior_of,
    precision,
    root_mean_squares,
    tensor_sizes,
)


class MeanFieldOptimizer(MeasuringOptimizer):
    """A mean-field variational optimizer; subclasses fill in the class attributes.

    Class attributes:
        noisy: Whether gradients are taken at samples; False leaves a point, no posterior.
        natural_update: The algorithm's pure, elementwise update.
        state_type: Its state: mean, curvature, momentum, and what else the algorithm keeps.
        default_step: The step of its callback without a learning rate.
        hyperparameters: The record of its hyperparameters.
        own_defaults: Its defaults, where they differ from the record's.
        averages_curvature: Whether its curvature is the running average of what is measured, and nothing more.

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
    natural_update: ClassVar[Callable[..., Any]]
    state_type: ClassVar[Any] = MeanFieldState
    averages_curvature: ClassVar[bool] = False
    default_step: ClassVar[StepRule] = "user"
    hyperparameters: ClassVar[type[Hyperparameters]] = Hyperparameters
    own_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        base: torch.optim.Optimizer | UserStep | None = None,
        own: Mapping[str, Any] | None = None,
        **fields: Unpack[OptimizerFields],
    ) -> None:
        given = {**fields, **(own or {}), **({} if base is None else {"step_rule": "user"})}
        values = self.hyperparameters.given(given, self.own_defaults)
        require_sizes(model)
        self._reference = reference_weights(model)
        self._points = points(model, values["bayesian"], norms=values["step_rule"] == "natural")
        self._functions: list[dict[str, Callable[[int], Any]]] = []  # of each group
        self.user_step = UserStep(base) if isinstance(base, torch.optim.Optimizer) else base
        self._scratch: dict[nn.Parameter, Tensor] = {}
        if params is None:
            params = trainable(model) if self.user_step is None else groups_of(self.user_step.base)
        engine, quantity = values["engine"], engine_quantity(self.measures)
        super().__init__(
            model,
            make_engine(engine, model, values["loss_reduction"], values["workspace_mib"], quantity=quantity),
            params,
            {**self.hyperparameters.group_values(values), "noisy": self.noisy, "noise_seed": values["seed"]},
            mc_samples=values["mc_samples"],
            max_nonfinite_steps=values["max_nonfinite_steps"],
        )

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
        check_base(group["step_rule"], self.user_step and self.user_step.base)
        if self.user_step is not None:
            self.user_step.add(group, len(self.param_groups))
        require_full_precision(group["params"])
        for param in group["params"]:
            self._state(param, group)

    def _state(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            size = root_mean_squares([self._reference.get(param, param).detach()])[0]
            state["step"] = 0
            only_averages = self.averages_curvature and group["step_rule"] == "user"
            for name in ("curvature",) if only_averages else self.state_type._fields[1:]:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["scale"] = torch.where(size > 0, size, torch.ones_like(size))
            state["noisy"] = param not in self._points
            if group["prior_mean"] == "initial":
                state["prior_mean"] = param.detach().clone()
        return state

    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        sample: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            for params in self._noisy_cohorts(group):
                drawn = [self._buffer(param) for param in params]
                noise.fill_(drawn)
                curvatures = [self.state[param]["curvature"] for param in params]
                means, scales = [param.detach() for param in params], [self.state[param]["scale"] for param in params]
                floors = noise_floor(group, tensor_sizes(means, scales))
                for block in blocks(params):
                    inverse_variance = precision(block.join(curvatures), **effective(group).precision_arguments)
                    std = inverse_variance.add_(block.spread(floors, params)).rsqrt_()
                    draws = block.join(drawn)
                    block.write_(drawn, torch.addcmul(block.join(means), draws, std, out=draws))
                sample.update(zip(params, drawn, strict=True))
        return sample

    def _noisy_cohorts(self, group: dict[str, Any]) -> Iterator[list[nn.Parameter]]:
        """Cohorts of the parameters that have noise now, their curvature started."""
        if group["noisy"]:
            effective(group)  # N must be known
            for cohort in self._cohorts(group):
                params = [param for param in cohort if self.state[param]["noisy"]]
                if params and self._start_curvature(params, group):
                    yield params

    def _cohorts(self, group: dict[str, Any]) -> list[list[nn.Parameter]]:
        """The group's trainable parameters, alike in device, dtype and number of updates."""
        alike: dict[Any, list[nn.Parameter]] = {}
        for param in group["params"]:
            if param.requires_grad:
                alike.setdefault((param.device, param.dtype, self._state(param, group)["step"]), []).append(param)
        return list(alike.values())

    def _buffer(self, param: nn.Parameter) -> Tensor:
        """Memory for one value of `param`: its sample during a pass, its step during an update."""
        buffer = self._scratch.get(param)
        if buffer is None or buffer.device != param.device or buffer.dtype != param.dtype:
            buffer = self._scratch[param] = torch.empty_like(param, requires_grad=False)
        return buffer

    def _start_curvature(self, params: list[nn.Parameter], group: dict[str, Any]) -> bool:
        """Put in the initial precision before the first update; whether there is a curvature."""
        if self.state[params[0]]["step"]:
            return True
        if group["init_precision"] is None:
            return False
        start = initial_curvature(group["init_precision"], **effective(group).precision_arguments)
        for param in params:
            self.state[param]["curvature"].fill_(start)
        return True

    def _update_all(self) -> None:
        for group in self.param_groups:
            effective(group)  # N must be known
            for params in self._cohorts(group):
                self._update_cohort(params, group)
        if self.user_step is not None:
            self.user_step.step(self.param_groups, self.state)
        self._count_update()

    def _count_update(self) -> None:
        for group, functions in zip(self.param_groups, self._functions, strict=True):
            group["step"] += 1
            apply_functions(group, functions, self.hyperparameters)

    def _update_cohort(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        # `_measured` has put zeros where backward did not reach.
        measured = [self._passes.curvature[param].contiguous() for param in params]
        states = [self.state[param] for param in params]
        if not self._start_curvature(params, group):
            torch._foreach_copy_([state["curvature"] for state in states], measured)
        for state in states:
            state["step"] += 1
        if group["weight_decay"] and group["step_rule"] != "user":
            torch._foreach_mul_(list[Tensor](params), 1 - group["lr"] * group["weight_decay"])
        if group["step_rule"] == "natural":
            self._natural_step(params, measured, self._update_arguments(group, states[0]["step"]))
        elif group["step_rule"] == "user":
            self._prepare_user_step(params, measured, group)
        else:
            self._bounded_step(params, measured, group)

    def _update_arguments(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """Keyword arguments of `natural_update`; subclasses may add what depends on the group."""
        now = effective(group)
        return {
            "lr": float(group["lr"]),
            "betas": group["betas"],
            "prior": now.prior,
            "damping": now.damping,
            "step": step,
            **{name: group[name] for name in self.hyperparameters.own_names()},
        }

    def _natural_step(
        self,
        params: list[nn.Parameter],
        measured: list[Tensor],
        hyper: dict[str, Any],
        steps: list[Tensor] | None = None,
    ) -> None:
        """The algorithm's own update; with `steps` the means stay, and their changes are written there."""
        grads = [param.grad.contiguous() for param in params if param.grad is not None]
        fields = {name: [self.state[param][name] for param in params] for name in self.state_type._fields[1:]}
        prior_means = self._prior_means(params)
        for block in blocks(params):
            mean = block.join(params)
            # Updates know a prior at zero only: they see the distance from its mean.
            centre = block.join(prior_means) if prior_means else None
            start = mean if centre is None else mean - centre
            old = self.state_type(start, *(block.join(field) for field in fields.values()))
            new = type(self).natural_update(old, block.join(grads), block.join(measured), **hyper)
            if steps is None:
                block.write_(params, new.mean if centre is None else new.mean + centre)
            else:
                block.write_(steps, new.mean - old.mean)
            for name, field in fields.items():
                block.write_(field, getattr(new, name))

    def _default_arguments(self, params: list[nn.Parameter], group: dict[str, Any]) -> dict[str, Any]:
        """As `_update_arguments`, for a curvature that the first batch has started."""
        hyper = self._update_arguments(group, self.state[params[0]]["step"])
        weights = hyper["betas"][0], trust_region.weight_of_old(hyper["betas"][1], hyper["step"])
        return {**hyper, "betas": weights, "lr": trust_region.NATURAL_RATE}

    def _bounded_step(self, params: list[nn.Parameter], measured: list[Tensor], group: dict[str, Any]) -> None:
        hyper = self._default_arguments(params, group)
        steps = [self._buffer(param) for param in params]
        self._natural_step(params, measured, hyper, steps)
        trust_region.bounded_step_(params, steps, self._radius(params, group, hyper["step"]))

    def _prepare_user_step(self, params: list[nn.Parameter], measured: list[Tensor], group: dict[str, Any]) -> None:
        hyper = self._default_arguments(params, group)
        if self.averages_curvature:
            torch._foreach_lerp_([self.state[param]["curvature"] for param in params], measured, 1 - hyper["betas"][1])
        else:
            self._natural_step(params, measured, hyper, [self._buffer(param) for param in params])
        add_prior_gradient_(params, self._prior_means(params), hyper["prior"] * group["prior_on_mean"])

    def _prior_means(self, params: list[nn.Parameter]) -> list[Tensor]:
        return [self.state[param]["prior_mean"] for param in params if "prior_mean" in self.state[param]]

    def _radius(self, params: list[nn.Parameter], group: dict[str, Any], step: int) -> Tensor | float:
        """How far the trust region lets each of `params` go at their update number `step`."""
        if group["radius"] != "sgd":
            return trust_region.adam_radius(float(group["lr"]))
        sizes = root_mean_squares([self.state[param]["momentum"] for param in params])
        sizes = debiased(sizes, group["betas"][0], step)
        return trust_region.sgd_radius(float(group["lr"]), group["momentum"], sizes)

    def _start_noise(self) -> None:
        """Start the curvature where `init_precision` says it."""
        for group in self.param_groups:
            for _ in self._noisy_cohorts(group):
                pass

    @torch.no_grad()
    def posterior(self) -> WeightPosterior:
        """The posterior by the model's parameter names.

        Returns:
            Copies of mean and precision; parameters without noise are among the constants.
        """
        self._start_noise()
        names = {param: name for name, param in self.model.named_parameters()}
        found = posterior_of(Entry(names[param], param, group, self.state[param]) for group, param in self._trained())
        others = {n: v for n, v in self.model.state_dict().items() if n not in found.mean and isinstance(v, Tensor)}
        return replace(found, constants={n: v.detach().clone() for n, v in others.items()})

    @torch.no_grad()
    def floored_share(self) -> Tensor:
        """Share of weights whose noise is set by the relative floor: their curvature alone would allow more than κr.

        Returns:
            A scalar between 0 and 1.
        """
        found = list(self._floored())
        return torch.stack([count for count, _ in found]).sum() / sum(n for _, n in found) if found else torch.zeros(())

    def _floored(self) -> Iterator[tuple[Tensor, int]]:
        """How many weights the floor sets, and how many there are."""
        for group in (group for group in self.param_groups if group["relative_noise"] is not None):
            for param in (param for params in self._cohorts(group) for param in params):
                state = self.state[param]
                if state["step"] and state["noisy"]:
                    floor = noise_floor(group, tensor_sizes([param.detach()], [state["scale"]]))[0]
                    yield (
                        (precision(state["curvature"], **effective(group).precision_arguments) < floor).sum(),
                        param.numel(),
                    )
