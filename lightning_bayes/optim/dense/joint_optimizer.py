"""Base of optimizers whose posterior correlates all weights of a small model.

They work in plain PyTorch like `VOGN`: ``with opt.sampled_params(): loss.backward()``, then ``opt.step()``. Unless
``init_precision`` is set, the first pass uses no noise and the curvature average starts with the first measurement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Capture
from lightning_bayes.curvature.parameters import require_full_precision
from lightning_bayes.errors import PosteriorError, UnsupportedTrainingError
from lightning_bayes.optim.dense.estimators import JointEstimator
from lightning_bayes.optim.effective import Effective
from lightning_bayes.optim.groups import flat
from lightning_bayes.optim.hyperparameters import Hyperparameters
from lightning_bayes.optim.readout.state import constants_of
from lightning_bayes.optim.runtime.base import NoisyOptimizer
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.parameters import require_initialised
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass, Measurement
from lightning_bayes.optim.schedules import BetaSchedule, Schedule, apply_schedules, take_schedules
from lightning_bayes.optim.settings import plain
from lightning_bayes.posteriors import AbstractPosterior

PosteriorT = TypeVar("PosteriorT", bound=AbstractPosterior)


class JointFields(TypedDict, total=False):
    """Arguments shared by all optimizers of joint posteriors.

    Attributes:
        lr: Learning rate α. Default: 0.01.
        betas: (β₁, β₂), decay rates of the momentum and of the curvature average. Default: (0.9, 0.999).
        num_data: N, number of training examples. Required before the first update.
        prior_precision: Precision δ of the prior N(0, 1/δ). Default: 1.
        kl_weight: τ, weight of the KL term, above 0. Values below 1 give a cold posterior, values above 1 a warm one.
            Default: 1.
        data_augmentation_factor: ρ, factor by which data augmentation increases the number of examples: Ñ = ρN. Default: 1.
        damping: γ, added to the curvature in the preconditioner. Default: 0.
        damping_in_noise: Whether γ also counts in the noise and in the posterior precision. Default: False.
        init_precision: Posterior precision before the first update. None: the first pass uses no noise, and the curvature
            average starts with the first batch.
        mc_samples: K, number of weight samples per ``step(closure)``. Default: 1.
        seed: Seed of the noise. Default: 0.
        max_nonfinite_steps: Training stops with `NonFiniteError` after this many consecutive updates with a non-finite
            measurement; each of them is skipped. Default: 10.
    """

    lr: float | Schedule
    betas: tuple[float, float] | BetaSchedule
    num_data: int | None
    prior_precision: float | Schedule
    kl_weight: float | Schedule
    data_augmentation_factor: float | Schedule
    damping: float | Schedule
    damping_in_noise: bool
    init_precision: float | None
    mc_samples: int
    seed: int
    max_nonfinite_steps: int


class JointState(NamedTuple):
    """The state of all weights; means and momenta in the order of the parameters."""

    means: list[Tensor]
    momenta: list[Tensor]
    curvature: list[Tensor]  # in the order of `JointEquations.places`


class JointEquations(ABC, Generic[PosteriorT]):
    """The equations of one posterior over all weights: sample, update and posterior.

    A `PosteriorFamily` acts on its optimizer's state; this class computes, and `JointOptimizer` applies the results. Values
    of all weights have the order of the parameters. A curvature is a list of tensors in the order of `places`.

    Attributes:
        params: The parameters.
        places: Where the optimizer's state holds the tensors of the curvature: a parameter, and a key of its state.
    """

    params: list[nn.Parameter]
    places: list[tuple[nn.Parameter, str]]

    @abstractmethod
    def initial(self, init_precision: float, effective: Effective) -> list[Tensor]:
        """Return the curvature whose posterior has the precision `init_precision`."""

    @abstractmethod
    def sample(self, curvature: list[Tensor], noise: list[Tensor], effective: Effective) -> list[Tensor]:
        """Transform standard normal noise into a posterior sample of the parameters."""

    @abstractmethod
    def update(self, state: JointState, grads: list[Tensor], measured: list[Tensor], **arguments: Any) -> JointState:
        """Compute the paper's update with `arguments` lr, betas, prior, damping and step; modifies nothing."""

    @abstractmethod
    def posterior(
        self, curvature: list[Tensor], names: dict[nn.Parameter, str], shared: dict[str, Any], effective: Effective
    ) -> PosteriorT:
        """Build the posterior from the curvature and the constructor arguments that all posteriors share."""


class JointOptimizer(NoisyOptimizer, ABC, Generic[PosteriorT]):
    """Trains a posterior that correlates all weights; subclasses choose the equations and the curvature estimator.

    Args:
        model: The model; all of its trainable parameters are trained.
        equations: The equations of the posterior.
        estimator: Curvature estimator.
        fields: See `JointFields`.
    """

    joins_weights = True

    @abstractmethod
    def __init__(
        self,
        model: nn.Module,
        equations: JointEquations[PosteriorT],
        estimator: JointEstimator,
        fields: JointFields,
    ) -> None:
        accepted = JointFields.__annotations__
        unknown = sorted(set(fields) - set(accepted))
        if unknown:
            raise TypeError(
                f"There is no argument {', '.join(unknown)}. The arguments are: {', '.join(sorted(accepted))}."
            )
        require_initialised(model)
        require_full_precision(equations.params)
        values = Hyperparameters.given(fields, {"lr": 1e-2})
        names = {*accepted, "kl_warmup_steps", "kl_warmup_init", "step"}
        defaults = {name: value for name, value in Hyperparameters.group_values(values).items() if name in names}
        self.equations, self.estimator = equations, estimator
        super().__init__(
            model,
            estimator.engine,
            equations.params,
            plain({**defaults, "noise_seed": values["seed"]}),
            mc_samples=values["mc_samples"],
            max_nonfinite_steps=values["max_nonfinite_steps"],
        )
        self._schedules = take_schedules(self.param_groups[0], Hyperparameters)
        Hyperparameters.check(flat(self.param_groups[0]), complete=True)

    @torch.no_grad()
    def posterior(self) -> PosteriorT:
        """Return the posterior, with the model's parameter names.

        Returns:
            Copies of mean and precision; frozen parameters and buffers are among the constants.

        Raises:
            PosteriorError: Before the first update, unless ``init_precision`` is set.
        """
        hyperparameters = self._hyperparameters
        curvature = self._curvature(hyperparameters)
        if curvature is None:
            raise PosteriorError(
                f"{type(self).__name__} has no posterior before its first update. Train it first, or pass init_precision=..."
            )
        names = {param: name for name, param in self.model.named_parameters()}
        mean = {names[param]: param.detach().clone() for param in self.equations.params}
        shared = {
            "mean": mean,
            "prior_precision": dict.fromkeys(mean, hyperparameters.prior_precision),
            "num_data": hyperparameters.num_data,
            "constants": {
                name: value.detach().clone() for name, value in constants_of(self.model.state_dict(), mean).items()
            },
        }
        return self.equations.posterior(curvature, names, shared, hyperparameters.effective())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the only parameter group; a second one raises `UnsupportedTrainingError`."""
        if self.param_groups:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} joins all weights under one set of hyperparameters, so it has one parameter group. "
                "To exclude parameters, freeze them with requires_grad_(False) before constructing the optimizer."
            )
        super().add_param_group(param_group)

    @property
    def _hyperparameters(self) -> Hyperparameters:
        return Hyperparameters.of(flat(self.param_groups[0]))

    def _curvature(self, hyperparameters: Hyperparameters) -> list[Tensor] | None:
        """The current curvature of the noise; None before the first update without an initial precision."""
        first, name = self.equations.places[0]
        if name in self.state[first]:
            return [self.state[param][key] for param, key in self.equations.places]
        if hyperparameters.init_precision is None:
            return None
        return self.equations.initial(hyperparameters.init_precision, hyperparameters.effective())

    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        hyperparameters, params = self._hyperparameters, self.equations.params
        curvature = self._curvature(hyperparameters)
        if curvature is None:
            return {}
        values = [torch.empty_like(param, requires_grad=False) for param in params]
        noise.fill_(values)
        torch._foreach_copy_(values, self.equations.sample(curvature, values, hyperparameters.effective()))
        return dict(zip(params, values, strict=True))

    def _capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        params = set(self.equations.params)
        frozen = [name for name, p in self.model.named_parameters() if p in params and not p.requires_grad]
        if frozen:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} joins all weights that were trainable when it was constructed, but "
                f"{', '.join(frozen)} were frozen afterwards. Freeze parameters before constructing the optimizer."
            )
        return self.estimator.capture(self.label_seed(sample), loss_scale)

    def _read_pass(self, finished: FinishedPass) -> Curvature:
        return dict(enumerate(self.estimator.read(finished.captured, finished.loss_scale)))

    def _finalise_curvature(self, curvature: Curvature) -> Curvature:
        return dict(curvature)

    def _update_all(self, measurement: Measurement) -> None:
        hyperparameters, equations = self._hyperparameters, self.equations
        params, effective = equations.params, hyperparameters.effective()
        measured, old = list(measurement.curvature.values()), self._curvature(hyperparameters)
        states = [self.state[param] for param in params]
        momenta = [state.get("momentum", torch.zeros_like(param)) for state, param in zip(states, params, strict=True)]
        new = equations.update(
            JointState(list[Tensor](params), momenta, measured if old is None else old),
            [param.grad for param in params if param.grad is not None],
            measured,
            lr=hyperparameters.lr,
            betas=hyperparameters.betas,
            prior=effective.prior,
            damping=effective.damping,
            step=hyperparameters.step + 1,
        )
        for param, state, mean, momentum in zip(params, states, new.means, new.momenta, strict=True):
            param.copy_(mean)
            state["momentum"] = momentum.clone()
        for (param, key), tensor in zip(equations.places, new.curvature, strict=True):
            self.state[param][key] = tensor
        self.param_groups[0]["posterior"]["step"] += 1
        apply_schedules(self.param_groups[0], self._schedules, Hyperparameters)
