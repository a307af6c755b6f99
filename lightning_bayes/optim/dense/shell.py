"""The shell of optimizers whose posterior correlates all weights of a small model: it carries tensors in and out.

Hyperparameters are constants, and there is one parameter group. Unless ``init_precision`` is set, the first pass uses no
noise and the curvature average starts with the first measurement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Capture, LossReduction
from lightning_bayes.curvature.parameters import require_full_precision
from lightning_bayes.errors import HyperparameterError, PosteriorError, UnsupportedTrainingError
from lightning_bayes.optim.dense.measurements import JointMeasurement
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.finished_pass import Curvature, FinishedPass, UpdateMeasurement
from lightning_bayes.optim.groups import KEY
from lightning_bayes.optim.hyperparameters import HostSettings, OptimizerFields, require_bounded_prior
from lightning_bayes.optim.noise import CounterNoise
from lightning_bayes.optim.optimizer import NoisyOptimizer
from lightning_bayes.optim.parameters import require_initialised
from lightning_bayes.optim.settings import declaration_of, plain, refuse_unknown

DECLARATION = declaration_of(OptimizerFields, HostSettings)


def reduction_of(arguments: OptimizerFields) -> LossReduction:
    """How the loss is reduced over examples."""
    return arguments.get("loss_reduction", "auto")


class JointState(NamedTuple):
    """Means and momenta in the order of a method's parameters, and its curvature in the order of its `names`."""

    means: Sequence[Tensor]
    momenta: list[Tensor]
    curvature: list[Tensor]


class Equations(Protocol):
    """A method's equations, on lists of tensors in the order of its parameters; curvatures in the order of `names`."""

    params: list[nn.Parameter]
    names: list[str]  # of the curvature's tensors in the state of the first parameter

    def initial(self, init_precision: float, hyper: Effective) -> list[Tensor]:
        """The curvature whose posterior has the precision `init_precision`."""

    def sample(self, curvature: list[Tensor], noise: list[Tensor], hyper: Effective) -> list[Tensor]:
        """A posterior sample from standard normal noise."""

    def update(self, old: JointState, grads: list[Tensor], measured: list[Tensor], **numbers: Any) -> JointState:
        """The new state; `numbers` are lr, betas, prior, damping and step."""

    def posterior(self, curvature: list[Tensor], hyper: Effective, **shared: Any) -> Any:
        """The posterior, from the constructor arguments that all posteriors share; ``mean`` is in the order of `params`."""


class DenseOptimizer(NoisyOptimizer, ABC):
    """Trains a joint posterior over all weights; subclasses choose the equations and what they measure.

    Of `OptimizerFields` it takes ``lr``, 0.01 by default, and those that apply to any posterior, as constants.
    """

    joins_weights = True
    estimator: JointMeasurement

    @abstractmethod
    def __init__(
        self, model: nn.Module, equations: Equations, measurement: JointMeasurement, arguments: OptimizerFields
    ) -> None:
        refuse_unknown(arguments, {name for name, setting in DECLARATION.settings.items() if setting.joint})
        if functions := sorted(name for name, value in arguments.items() if callable(value)):
            raise HyperparameterError(
                f"{', '.join(functions)} cannot be a function of the step in {type(self).__name__}."
            )
        require_initialised(model)
        require_full_precision(equations.params)
        values = DECLARATION.completed(arguments, {"lr": 1e-2})
        require_bounded_prior(values, DECLARATION.defaults)
        self.equations, self.estimator = equations, measurement
        super().__init__(
            model,
            measurement.engine,
            equations.params,
            plain({**DECLARATION.group_values(values), "noise_seed": values["seed"]}),
            mc_samples=values["mc_samples"],
            max_nonfinite_steps=values["max_nonfinite_steps"],
        )

    @torch.no_grad()
    def posterior(self) -> Any:
        """Copies of mean and precision by name; raises `PosteriorError` before the first update without `init_precision`."""
        (group,), hyper = self.param_groups, effective(self.param_groups[0])
        curvature = self._curvature(group)
        if curvature is None:
            raise PosteriorError(
                f"{type(self).__name__} has no posterior before its first update. Train it first, or pass init_precision=..."
            )
        names = {param: name for name, param in self.model.named_parameters()}
        mean = {names[param]: param.detach().clone() for param in self.equations.params}
        state = self.model.state_dict()
        return self.equations.posterior(
            curvature,
            hyper,
            mean=mean,
            prior_precision=dict.fromkeys(mean, group[KEY]["prior_precision"]),
            num_data=group[KEY]["num_data"],
            constants={name: value.detach().clone() for name, value in state.items() if name not in mean},
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only parameter group; a second one raises `UnsupportedTrainingError`."""
        if self.param_groups:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} joins all weights under one set of hyperparameters, so it has one parameter group. "
                "To exclude parameters, freeze them with requires_grad_(False) before constructing the optimizer."
            )
        super().add_param_group(param_group)

    def _curvature(self, group: dict[str, Any]) -> list[Tensor] | None:
        """The curvature of the noise; None before the first update without an initial precision."""
        state, start = self.state[self.equations.params[0]], group[KEY]["init_precision"]
        if state:
            return [state[name] for name in self.equations.names]
        return None if start is None else self.equations.initial(start, effective(group))

    def draw_sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        """Draw a posterior sample; empty before the curvature is known."""
        (group,), params = self.param_groups, self.equations.params
        curvature = self._curvature(group)
        if curvature is None:
            return {}
        draws = [torch.empty_like(param, requires_grad=False) for param in params]
        noise.fill_(draws)
        values = self.equations.sample(curvature, draws, effective(group))
        return {param: value.clone() for param, value in zip(params, values, strict=True)}

    def capture_pass(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        """The measurement's capture; refuses parameters that were frozen since the construction."""
        params = set(self.equations.params)
        frozen = [name for name, p in self.model.named_parameters() if p in params and not p.requires_grad]
        if frozen:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} joins all weights that were trainable when it was constructed, but "
                f"{', '.join(frozen)} were frozen afterwards. Freeze parameters before constructing the optimizer."
            )
        return self.estimator.capture(self.label_seed(sample), loss_scale)

    def read_pass(self, finished: FinishedPass) -> Curvature:
        """Read the joint curvature of a pass."""
        return self.estimator.read(finished, self.equations.params, lambda params: {})

    def _update_all(self, measurement: UpdateMeasurement) -> None:
        (group,), params = self.param_groups, self.equations.params
        hyper, states = effective(group), [self.state[param] for param in params]
        measured = list(measurement.curvature.values())
        momenta = [state.get("momentum", torch.zeros_like(param)) for param, state in zip(params, states, strict=True)]
        new = self.equations.update(
            JointState(params, momenta, self._curvature(group) or measured),
            [measurement.grads[param] for param in params],
            measured,
            lr=group["lr"],
            betas=group[KEY]["betas"],
            prior=hyper.prior,
            damping=hyper.damping,
            step=group[KEY]["step"] + 1,
        )
        for param, state, mean, momentum in zip(params, states, new.means, new.momenta, strict=True):
            param.copy_(mean)
            state["momentum"] = momentum.clone()
        states[0].update(zip(self.equations.names, new.curvature, strict=True))
        group[KEY]["step"] += 1
