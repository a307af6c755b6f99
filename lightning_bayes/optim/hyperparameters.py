"""The arguments that all noisy optimizers share, and those that they share with the callbacks.

An algorithm with arguments of its own declares them in a typed dictionary (`optim.settings`):

    class IVONOwn(TypedDict, total=False):                                    # adds clip_radius and rescale_lr
    class IVON(VariationalOptimizer):
        own_arguments = IVONOwn
        own_defaults = {"betas": (0.9, 0.99999)}

Parameter groups are plain dicts, so schedulers can write into them and checkpoints hold plain numbers. `optim.effective`
derives Ñ, τ, δ̃ and γ from a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import signature
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict, get_args

import torch
from torch import nn

from lightning_bayes.curvature import DEFAULT_MIB, EngineName, LossReduction
from lightning_bayes.errors import HyperparameterError
from lightning_bayes.optim.argument_help import argument_help, with_arguments
from lightning_bayes.optim.effective import effective
from lightning_bayes.optim.measuring import require_interval
from lightning_bayes.optim.schedules import BetaSchedule, Schedule, value_at
from lightning_bayes.optim.settings import (
    BETAS,
    COUNT,
    INVERTIBLE,
    MOMENTUM,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_COUNT,
    POSITIVE_FRACTION,
    WHOLE,
    Declaration,
    Setting,
    choice,
    declaration_of,
    plain,
)
from lightning_bayes.posteriors import AbstractPosterior

PriorMean: TypeAlias = Literal["zero", "initial"]
StepRule: TypeAlias = Literal["natural", "trust_region", "user"]
StepName: TypeAlias = Literal["user", "natural"]  # of callbacks
DecayKind: TypeAlias = Literal["decoupled", "unknown", "prior", "replaced"]  # see `optim.base_optimizer`
RadiusRule: TypeAlias = Literal["adam", "sgd"]
Number: TypeAlias = float | Schedule

_MAX_PRIOR = 1e12  # δ̃


class HyperparameterFields(TypedDict, total=False):
    """Arguments shared by optimizers and callbacks.

    Attributes:
        betas: (β₁, β₂), decay rates of the momentum and of the curvature average, as in Adam. Default: (0.9, 0.999)
            unless the algorithm overrides it.
        num_data: N, number of training examples. Optimizers require it before the first update; callbacks infer it.
        prior_mean: Mean μ₀ of the prior: ``"zero"``, or ``"initial"`` for the initial weights, such as pretrained ones.
            Default: ``"zero"``.
        kl_weight: τ, weight of the KL term. Values below 1 give a cold posterior, values above 1 a warm one.
            Default: 1.
        kl_warmup_steps: Number of updates over which τ grows linearly to `kl_weight`, where 0 disables it. Default: 0.
        kl_warmup_init: τ at the start of the warm-up, as a fraction of `kl_weight`. Default: 0.1.
        damping: γ, added to the curvature in the preconditioner. Default: 0 unless the algorithm overrides it.
        damping_in_noise: Whether γ also counts in the posterior precision, as in Osawa et al. 2019. Default: False.
        init_precision: Posterior precision before the first update. None: the first pass uses no noise, and the curvature
            average starts with the first batch. Steps other than the natural one discard the initial precision at the first
            measurement.
        relative_noise: κ, root mean square of each tensor's noise relative to the size of the tensor (a heuristic), see
            `posteriors.shaped_noise`. None: the noise that the variational bound prescribes. With a base optimizer and
            without this argument: by loss and kind of network, as in the callbacks (`optim.default_noise`).
        noise_flatness: ε, flatness of the noise within a tensor if `relative_noise` is set. With a small ε the noise follows
            the curvature, with a large ε it is isotropic, see `posteriors.shaped_noise`. None: 0.03.
        max_noise: σ_max, upper bound on the standard deviation of every weight's noise, in the units of the weights. It adds
            1/σ_max² to the precision of the noise and of the posterior that is read out and saved, like a damping of
            (τ/Ñ)/σ_max² in the noise alone. Steps, the prior and ``init_precision`` ignore it. None: no bound.
        bayesian: Regular expression that selects the parameters with a posterior by name. The same step trains all other
            parameters without noise. None: all parameters, except for normalisation layers unless the step is natural.
        antithetic: Whether the updates 2j and 2j+1 use the same noise with opposite signs. Over such a pair the first-order
            effect of the noise on the gradient cancels, and fewer random numbers are drawn (`optim.noise`). None:
            False for the natural step, True for all other steps.
        mc_samples: K, number of weight samples per batch and process. Default: 1 unless the algorithm overrides it.
        engine: Curvature engine: ``"fused"`` uses this package's rules, ``"backpack"`` BackPACK's where it has one.
            Default: ``"fused"``.
        loss_reduction: How the loss is reduced over examples: ``"mean"``, ``"sum"``, or ``"auto"`` to infer it, see
            `curvature.measure`. Default: ``"auto"``.
        seed: Seed of the noise. The global random number generator is never used. Default: 0.
        max_nonfinite_steps: Consecutive updates with a non-finite gradient or curvature after which training stops with
            `NonFiniteError`. Each of them is skipped. Default: 10.
    """

    betas: Annotated[tuple[float, float] | BetaSchedule, Setting(BETAS, (0.9, 0.999), schedulable=True, joint=True)]
    num_data: Annotated[int | None, Setting(POSITIVE, optional=True, joint=True)]
    prior_mean: Annotated[PriorMean, Setting(choice(*get_args(PriorMean)), "zero")]
    kl_weight: Annotated[Number, Setting(POSITIVE, 1.0, upper_limit=1e12, schedulable=True, joint=True)]
    kl_warmup_steps: Annotated[int, Setting(NOT_NEGATIVE, 0)]
    kl_warmup_init: Annotated[float, Setting(POSITIVE_FRACTION, 0.1)]
    damping: Annotated[Number, Setting(NOT_NEGATIVE, 0.0, upper_limit=1e12, schedulable=True, joint=True)]
    damping_in_noise: Annotated[bool, Setting(default=False, joint=True)]
    init_precision: Annotated[float | None, Setting(POSITIVE, upper_limit=1e30, optional=True, joint=True)]
    relative_noise: Annotated[Number | None, Setting(POSITIVE, upper_limit=1e12, schedulable=True, optional=True)]
    noise_flatness: Annotated[float | None, Setting(POSITIVE, upper_limit=1e12, optional=True)]
    max_noise: Annotated[Number | None, Setting(INVERTIBLE, upper_limit=1e12, schedulable=True, optional=True)]
    bayesian: Annotated[str | None, Setting(in_group=False)]
    antithetic: Annotated[bool | None, Setting()]
    mc_samples: Annotated[int, Setting(POSITIVE_COUNT, 1, in_group=False, joint=True)]
    engine: Annotated[EngineName, Setting(default="fused", in_group=False)]
    loss_reduction: Annotated[LossReduction, Setting(default="auto", in_group=False, joint=True)]
    seed: Annotated[int, Setting(WHOLE, 0, in_group=False, joint=True)]  # groups hold it as noise_seed
    max_nonfinite_steps: Annotated[int, Setting(POSITIVE_COUNT, 10, in_group=False, joint=True)]


class OptimizerFields(HyperparameterFields, total=False):
    """Arguments of the optimizers: `HyperparameterFields` and the following.

    Attributes:
        lr: Learning rate α of the natural step. With ``step_rule="trust_region"``, the learning rate of the Adam or SGD
            whose step size bounds the natural step. Default: 0.001.
        prior_precision: Precision δ of the prior N(μ₀, 1/δ). Default: 1.
        prior: Mean-field posterior of earlier data to use as the prior. It sets μ₀ and δ for each weight of the parameters
            that it names, see `optim.weight_prior`.
        data_augmentation_factor: ρ, factor by which data augmentation increases the number of examples: Ñ = ρN. Default: 1.
        weight_decay: Decoupled weight decay as in AdamW, μ ← (1 - α·wd) μ before the step. It is not part of the posterior.
            Default: 0.
        step_rule: ``"natural"``: the paper's step. ``"trust_region"``: the natural step, bounded by the step size of Adam or
            SGD. ``"user"``: the step of the optimizer passed as `base`, which implies this rule. See `optim.steps`.
            Default: ``"natural"``.
        radius: Optimizer whose step size bounds the trust region: ``"adam"`` or ``"sgd"``. Default: ``"adam"``.
        momentum: Momentum of the SGD whose step size bounds the trust region. Default: 0.
        curvature_interval: T, number of updates between two measurements of the curvature. The first ten updates always
            measure it, see `optim.measuring`. Above 1 only for methods whose curvature is a running average.
            Default: 1.
        workspace_mib: Memory in MiB that the engine may use for per-example values. Default: 64.
    """

    lr: Annotated[Number, Setting(NOT_NEGATIVE, 1e-3, upper_limit=1e12, schedulable=True, joint=True)]
    prior_precision: Annotated[Number, Setting(POSITIVE, 1.0, upper_limit=1e30, schedulable=True, joint=True)]
    prior: Annotated[AbstractPosterior | None, Setting(in_group=False)]
    data_augmentation_factor: Annotated[Number, Setting(POSITIVE, 1.0, upper_limit=1e12, schedulable=True, joint=True)]
    weight_decay: Annotated[Number, Setting(NOT_NEGATIVE, 0.0, upper_limit=1e12, schedulable=True)]
    step_rule: Annotated[StepRule, Setting(choice(*get_args(StepRule)), "natural")]
    radius: Annotated[RadiusRule, Setting(choice(*get_args(RadiusRule)), "adam")]
    momentum: Annotated[Number, Setting(MOMENTUM, 0.0, schedulable=True)]
    curvature_interval: Annotated[int, Setting(POSITIVE_COUNT, 1)]
    workspace_mib: Annotated[float, Setting(default=DEFAULT_MIB, in_group=False)]


class VariationalArguments(OptimizerFields, total=False):
    """Keyword arguments of `VariationalOptimizer`, for subclasses that add arguments.

    Attributes:
        base: The optimizer that updates the posterior mean.
    """

    base: Any


class HostSettings(TypedDict, total=False):
    """What hosts and steps set in a group, beside the arguments.

    Attributes:
        prior_on_mean: Whether the user's step adds the prior's gradient.
        decay: What the group's ``weight_decay`` is; see `optim.steps`.
        loss_examples: Number of examples whose losses the training loss adds up, in the largest batch; 1 for a mean.
        step: Number of updates so far.
    """

    prior_on_mean: Annotated[bool, Setting(default=True)]
    decay: Annotated[DecayKind, Setting(choice(*get_args(DecayKind)), "decoupled")]
    loss_examples: Annotated[float, Setting(POSITIVE, 1.0)]
    step: Annotated[int, Setting(COUNT, 0)]


class NoArguments(TypedDict, total=False):
    """The own arguments of an algorithm that has none."""


class DeclaresArguments(ABC):
    """The update of an algorithm, and what it says about its arguments."""

    own_arguments: ClassVar[type] = NoArguments  # typed dictionary of the arguments that only this algorithm has
    own_defaults: ClassVar[Mapping[str, Any]] = {}  # override the declared ones
    group_state: ClassVar[Mapping[str, Any]] = {}  # what it stores in a group beside them, with initial values
    amortises: ClassVar[bool] = False  # whether updates may skip the measurement; see `optim.measuring`

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if issubclass(cls, torch.optim.Optimizer):  # else it is only a part of one
            kinds = (HyperparameterFields, OptimizerFields, cls.own_arguments)
            cls.__doc__ = with_arguments(cls.__doc__, argument_help(*kinds, defaults=cls.own_defaults))

    @classmethod
    def declaration(cls) -> Declaration:
        """The arguments, and what hosts set in groups."""
        return declaration_of(OptimizerFields, HostSettings, cls.own_arguments)

    @classmethod
    def check_together(cls, values: Mapping[str, Any]) -> None:
        """Raise `HyperparameterError` if values contradict each other, although each is within its range."""
        require_bounded_prior(values, cls.declaration().defaults)
        require_interval(cls.__name__, values.get("curvature_interval") or 1, amortises=cls.amortises)

    @classmethod
    def arguments_of_update(cls) -> list[str]:
        """Names of the own arguments that the update takes."""
        accepted = signature(cls.natural_update).parameters
        return [name for name in declaration_of(cls.own_arguments).settings if name in accepted]

    @staticmethod
    @abstractmethod
    def natural_update(*arguments: Any, **hyperparameters: Any) -> Any:
        """The algorithm's pure, elementwise update. Its arguments are the state, ĝ, ĥ and, by keyword, hyperparameters."""

    def configure(self, model: nn.Module, values: Mapping[str, Any]) -> None:
        """Take what the arguments choose for all groups, before the posterior family is built."""
        return


def require_bounded_prior(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise `HyperparameterError` if δ̃ is too large, although δ, τ and N are within their limits."""
    parts = {
        name: values.get(name) for name in ("kl_weight", "prior_precision", "num_data", "data_augmentation_factor")
    }
    numbers = plain({name: value_at(value, 0) for name, value in parts.items() if value is not None})
    if not {"kl_weight", "prior_precision", "num_data"} <= set(numbers):
        return
    derived = effective({"posterior": {**defaults, **numbers, "kl_warmup_steps": 0}})
    if derived.prior > _MAX_PRIOR:
        raise HyperparameterError(
            f"kl_weight={derived.kl_weight:g} times prior_precision={derived.prior_precision:g} is {derived.prior:.3g} per "
            f"example with num_data={numbers['num_data']!r}, but must be at most {_MAX_PRIOR:g}."
        )
