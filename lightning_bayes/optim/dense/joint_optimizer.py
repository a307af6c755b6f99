"""The optimizer around a posterior that joins all weights of a small model.

It serves plain PyTorch, as `VOGN` does: ``with opt.sampled_params(): loss.backward()``, then ``opt.step()``. The first pass
is free of noise, unless ``init_precision`` gives the noise, and the curvature starts with the first measurement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar, final

import torch
from torch import Tensor, nn

from lightning_bayes.curvature import Capture
from lightning_bayes.curvature.parameters import require_full_precision
from lightning_bayes.errors import PosteriorError, UnsupportedTrainingError
from lightning_bayes.optim.dense.estimators import JointEstimator
from lightning_bayes.optim.hyperparameters import Hyperparameters
from lightning_bayes.optim.runtime.base import NoisyOptimizer
from lightning_bayes.optim.runtime.noise import CounterNoise
from lightning_bayes.optim.runtime.parameters import require_sizes
from lightning_bayes.optim.runtime.passes import Curvature, FinishedPass, Measurement
from lightning_bayes.optim.schedules import BetaSchedule, Schedule, apply_functions, take_functions
from lightning_bayes.optim.settings import plain
from lightning_bayes.posteriors import AbstractPosterior

CurvatureT = TypeVar("CurvatureT")
PosteriorT = TypeVar("PosteriorT", bound=AbstractPosterior)
States: TypeAlias = Mapping[Any, dict[str, Any]]  # by parameter


class JointFields(TypedDict, total=False):
    """Arguments that the optimizers of joint posteriors share.

    Attributes:
        lr: α, 0.01 by default.
        betas: (β₁, β₂), weights of the old momentum and the old curvature.
        num_data: N. Required before the first update.
        prior_precision: δ of the prior N(0, 1/δ).
        kl_weight: τ, above 0: below 1 is a cold posterior, above 1 a warm one.
        data_augmentation_factor: ρ; the posterior counts Ñ = ρN examples.
        damping: γ, added to the curvature in the preconditioner.
        damping_in_noise: Whether γ counts in the noise and the posterior precision.
        init_precision: Posterior precision before the first update; None takes the first batch's curvature.
        mc_samples: K, weight samples per ``step(closure)``.
        seed: Seed of the noise.
        max_nonfinite_steps: Updates in a row that may be skipped for a measurement that is not finite.
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


@final
@dataclass(frozen=True)
class Moved(Generic[CurvatureT]):  # Python 3.10 has no generic NamedTuple
    """The result of an update."""

    means: list[Tensor]  # of every parameter
    momenta: list[Tensor]
    curvature: CurvatureT


class JointFamily(ABC, Generic[CurvatureT, PosteriorT]):
    """A posterior over all weights, with the paper's sample and update; tensors are listed in the parameters' order.

    Attributes:
        params: The parameters.
    """

    params: list[nn.Parameter]

    @abstractmethod
    def kept(self, states: States) -> CurvatureT | None:
        """The curvature in the optimizer's state; None before the first update."""

    @abstractmethod
    def keep(self, states: States, curvature: CurvatureT) -> None:
        """Write the curvature into the optimizer's state."""

    @abstractmethod
    def start(self, hyper: Hyperparameters) -> CurvatureT:
        """The curvature whose posterior has the precision ``init_precision``."""

    @abstractmethod
    def measured(self, tensors: list[Tensor]) -> CurvatureT:
        """The curvature from the means that the estimator has read."""

    @abstractmethod
    def sample(self, curvature: CurvatureT, noise: list[Tensor], hyper: Hyperparameters) -> list[Tensor]:
        """Turn standard normal noise into a posterior sample of the parameters."""

    @abstractmethod
    def update(
        self, old: CurvatureT, measured: CurvatureT, momenta: list[Tensor], grads: list[Tensor], hyper: Hyperparameters
    ) -> Moved[CurvatureT]:
        """The paper's update; writes nothing."""

    @abstractmethod
    def posterior(
        self, curvature: CurvatureT, names: dict[nn.Parameter, str], shared: dict[str, Any], hyper: Hyperparameters
    ) -> PosteriorT:
        """Build the posterior from the arguments that all families share, and the curvature."""


class JointOptimizer(NoisyOptimizer, ABC, Generic[CurvatureT, PosteriorT]):
    """Trains a posterior that joins all weights; final classes choose its family and its estimator.

    Args:
        model: The model, all of whose trainable parameters are taken.
        family: The posterior family.
        estimator: Measures the curvature.
        fields: See `JointFields`.
    """

    joins_weights = True

    @abstractmethod
    def __init__(
        self,
        model: nn.Module,
        family: JointFamily[CurvatureT, PosteriorT],
        estimator: JointEstimator,
        fields: JointFields,
    ) -> None:
        known = JointFields.__annotations__
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise TypeError(f"There is no argument {', '.join(unknown)}. These are: {', '.join(sorted(known))}.")
        require_sizes(model)
        require_full_precision(family.params)
        values = Hyperparameters.given(fields, {"lr": 1e-2})
        names = {*known, "kl_warmup_steps", "kl_warmup_init", "step"}
        defaults = {name: value for name, value in Hyperparameters.group_values(values).items() if name in names}
        self.family, self.estimator = family, estimator
        super().__init__(
            model,
            estimator.engine,
            family.params,
            plain({**defaults, "noise_seed": values["seed"]}),
            mc_samples=values["mc_samples"],
            max_nonfinite_steps=values["max_nonfinite_steps"],
        )
        self._functions = take_functions(self.param_groups[0], Hyperparameters)
        Hyperparameters.check(self.param_groups[0], complete=True)

    @torch.no_grad()
    def posterior(self) -> PosteriorT:
        """The posterior by the model's parameter names.

        Returns:
            Copies of mean and precision; frozen parameters and buffers are among the constants.

        Raises:
            PosteriorError: If nothing was measured yet.
        """
        hyper, params = self._hyper, self.family.params
        curvature = self._curvature(hyper)
        if curvature is None:
            raise PosteriorError(f"{type(self).__name__} has no posterior before its first update, or init_precision.")
        names = {param: name for name, param in self.model.named_parameters()}
        own = [names[param] for param in params]
        state = self.model.state_dict()
        shared = {
            "mean": {names[param]: param.detach().clone() for param in params},
            "prior_precision": dict.fromkeys(own, hyper.prior_precision),
            "num_data": hyper.num_data,
            "constants": {n: v.detach().clone() for n, v in state.items() if n not in own and isinstance(v, Tensor)},
        }
        return self.family.posterior(curvature, names, shared, hyper)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one group there is; see `torch.optim.Optimizer`.

        Args:
            param_group: The group.

        Raises:
            UnsupportedTrainingError: If there is one already: the posterior joins all weights of one group.
        """
        if self.param_groups:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} joins all weights under one set of hyperparameters, so it has one parameter group. "
                "Freeze what should not be learned with requires_grad_(False) before the optimizer is built."
            )
        super().add_param_group(param_group)

    @property
    def _hyper(self) -> Hyperparameters:
        return Hyperparameters.of(self.param_groups[0])

    def _curvature(self, hyper: Hyperparameters) -> CurvatureT | None:
        """The curvature of the noise now; None where there is no noise yet."""
        kept = self.family.kept(self.state)
        return self.family.start(hyper) if kept is None and hyper.init_precision is not None else kept

    def _sample(self, noise: CounterNoise) -> dict[nn.Parameter, Tensor]:
        hyper, params = self._hyper, self.family.params
        curvature = self._curvature(hyper)
        if curvature is None:
            return {}
        draws = [torch.empty_like(param, requires_grad=False) for param in params]
        noise.fill_(draws)
        torch._foreach_copy_(draws, self.family.sample(curvature, draws, hyper))
        return dict(zip(params, draws, strict=True))

    def _open_capture(self, sample: int, loss_scale: float) -> AbstractContextManager[Capture]:
        own = set(self.family.params)
        frozen = [name for name, p in self.model.named_parameters() if p in own and not p.requires_grad]
        if frozen:
            raise UnsupportedTrainingError(
                f"{type(self).__name__} joins all weights that were trainable when it was built, and these no longer are: "
                f"{', '.join(frozen)}. Freeze parameters before the optimizer is built."
            )
        return self.estimator.capture(self._label_seed(sample), loss_scale)

    def _read_pass(self, finished: FinishedPass) -> Curvature:
        return dict(enumerate(self.estimator.read(finished.captured, finished.loss_scale)))

    def _finalise_curvature(self, curvature: Curvature) -> Curvature:
        return dict(curvature)

    def _update_all(self, measurement: Measurement) -> None:
        hyper, family = self._hyper, self.family
        measured = family.measured(list(measurement.curvature.values()))
        old, grads = self._curvature(hyper), [param.grad for param in family.params if param.grad is not None]
        moved = family.update(measured if old is None else old, measured, self._momenta(), grads, hyper)
        for param, mean, momentum in zip(family.params, moved.means, moved.momenta, strict=True):
            param.copy_(mean)
            self.state[param]["momentum"] = momentum.clone()
        family.keep(self.state, moved.curvature)
        self.param_groups[0]["step"] += 1
        apply_functions(self.param_groups[0], self._functions, Hyperparameters)

    def _momenta(self) -> list[Tensor]:
        found = [(param, self.state[param].get("momentum")) for param in self.family.params]
        return [torch.zeros_like(param) if momentum is None else momentum for param, momentum in found]
