"""The one schema of hyperparameters: what each may be, its default, and what they amount to together.

`Hyperparameters` is a frozen record: each field declares default, range, upper limit and whether it may be a function of the
step, and validation is generated from it. An algorithm with hyperparameters of its own extends it, and names its defaults:

    class IVON(MeanFieldOptimizer):
        hyperparameters = IVONHyperparameters              # adds clip_radius and rescale_lr
        own_defaults = {"betas": (0.9, 0.99999)}

Parameter groups are plain dicts: schedulers write into them, and checkpoints hold plain numbers. `Hyperparameters.of(group)`
reads the record from one, and `optim.effective` computes what they amount to.

Constructors take the shared fields as typed keyword arguments, which type checkers, editors and jsonargparse read:

    def __init__(self, model, params=None, *, clip_radius=math.inf, **fields: Unpack[OptimizerFields])

jsonargparse takes the help texts from the TypedDict's own docstring, and refuses a parameter that is also a field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

from lightning_bayes.curvature import DEFAULT_MIB, EngineName, LossReduction
from lightning_bayes.optim.effective import Effective, effective
from lightning_bayes.optim.schedules import BetaSchedule, Schedule
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
    Record,
    choice,
    setting,
)
from lightning_bayes.posteriors import AbstractPosterior

PriorMean: TypeAlias = Literal["zero", "initial"]
StepRule: TypeAlias = Literal["natural", "trust_region", "user"]
StepName: TypeAlias = Literal["user", "natural"]  # of callbacks
RadiusRule: TypeAlias = Literal["adam", "sgd"]
HyperparametersT = TypeVar("HyperparametersT", bound="Hyperparameters")

_LARGEST_PRIOR = 1e12  # δ̃


class HyperparameterFields(TypedDict, total=False):
    """Arguments that optimizers and callbacks share; see `Hyperparameters` for defaults and ranges.

    Attributes:
        betas: (β₁, β₂), weights of the old momentum and the old curvature, as in Adam. Default: (0.9, 0.999)
            unless the algorithm has its own.
        num_data: N, number of training examples. Optimizers need it before the first update; callbacks infer it.
        prior_mean: ``"zero"``, or ``"initial"`` for μ₀ = the weights at the start, such as pretrained ones.
            Default: ``"zero"``.
        kl_weight: τ, weight of the KL term, above 0: below 1 is a cold posterior, above 1 a warm one. Default: 1.
        kl_warmup_steps: Updates over which τ grows linearly to `kl_weight`; 0 for none. Default: 0.
        kl_warmup_init: Fraction of `kl_weight` at the start of the warm-up. Default: 0.1.
        damping: γ, added to the curvature in the preconditioner. Default: 0.
        damping_in_noise: Whether γ counts in the posterior precision too, as in Osawa et al. 2019. Default: no.
        init_precision: Posterior precision before the first update. None takes the curvature of the first batch, whose
            pass is then free of noise. Unless the step is natural, running averages start anew with the first measurement.
        relative_noise: κ, root mean square of each tensor's noise in units of the tensor's size, see
            `posteriors.shaped_noise` (a heuristic). None: the noise of the bound, as wide as it is.
        noise_flatness: ε, how flat the noise of size κ is, see `posteriors.shaped_noise`. None: 0.03.
        max_noise: σ_max, bound of the standard deviation of every weight's noise, in the weights' own units. It acts like a
            damping of (τ/Ñ)/σ_max² that counts in the noise alone, so it adds 1/σ_max² to the precision of sampling
            and to that of the posterior that is read out and saved. Steps, priors and ``init_precision``, the precision
            without it, do not see it. None: no bound.
        bayesian: Regular expression of the names of the parameters that have a posterior; the others are trained by the
            same step, without noise. None for all, except for normalisation layers where the step is not natural.
        antithetic: Whether the updates 2j and 2j+1 share their noise, with opposite signs, so that the first order of what
            it does to the gradient cancels, and each draw serves twice or more often (`optim.runtime.noise`). None: no for
            the papers' natural step, yes for others.
        mc_samples: K, weight samples per batch and process.
        engine: Curvature engine: ``"fused"`` measures any layer, ``"backpack"`` the layers that BackPACK knows.
            Default: ``"fused"``.
        loss_reduction: ``"auto"``, ``"mean"`` or ``"sum"``: how the loss reduces its examples, see `curvature.measure`.
            Default: ``"auto"``.
        seed: Seed of the noise. The global random number generator is not used. Default: 0.
        max_nonfinite_steps: Updates in a row that may be skipped for a gradient or curvature that is not finite.
            Default: 10.
    """

    betas: tuple[float, float] | BetaSchedule
    num_data: int | None
    prior_mean: PriorMean
    kl_weight: float | Schedule
    kl_warmup_steps: int
    kl_warmup_init: float
    damping: float | Schedule
    damping_in_noise: bool
    init_precision: float | None
    relative_noise: float | Schedule | None
    noise_flatness: float | None
    max_noise: float | Schedule | None
    bayesian: str | None
    antithetic: bool | None
    mc_samples: int
    engine: EngineName
    loss_reduction: LossReduction
    seed: int
    max_nonfinite_steps: int


class OptimizerFields(HyperparameterFields, total=False):
    """Arguments of the optimizers: those of `HyperparameterFields`, and these.

    Attributes:
        lr: Learning rate α of the natural step; with ``step_rule="trust_region"`` the learning rate η of the optimizer
            whose step bounds this one.
        prior_precision: δ of the prior N(μ₀, 1/δ).
        prior: A mean-field posterior of earlier data: μ₀ and δ of each weight that it names, see `optim.weight_prior`.
        data_augmentation_factor: ρ; the posterior counts Ñ = ρN examples.
        weight_decay: Decoupled weight decay as in AdamW: μ ← (1 - α·wd) μ before the step. Not part of the posterior.
        step_rule: ``"natural"``, the papers'; ``"trust_region"``; ``"user"``, implied by `base`; see `optim.steps`.
        radius: The optimizer whose step bounds the trust region: ``"adam"`` or ``"sgd"``.
        momentum: Momentum of the SGD whose step bounds the trust region.
        curvature_interval: T, updates between measurements of the curvature, after ten that all measure; see
            `optim.runtime.measuring`. Only for methods whose curvature is a running average. Default: 1.
        workspace_mib: Memory in MiB that the engine may fill at once with values of single examples.
    """

    lr: float | Schedule
    prior_precision: float | Schedule
    prior: AbstractPosterior | None
    data_augmentation_factor: float | Schedule
    weight_decay: float | Schedule
    step_rule: StepRule
    radius: RadiusRule
    momentum: float | Schedule
    curvature_interval: int
    workspace_mib: float


class MeanFieldArguments(OptimizerFields, total=False):
    """Keyword arguments of `MeanFieldOptimizer`, for subclasses with arguments of their own.

    Attributes:
        base: The optimizer that moves the means.
    """

    base: Any


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(Record):
    """Hyperparameters of a noisy optimizer at one step, as numbers; see `OptimizerFields` for their meaning."""

    lr: float = setting(NOT_NEGATIVE, default=1e-3, upper_limit=1e12, schedulable=True, open_until_fit=True)
    betas: tuple[float, float] = setting(BETAS, default=(0.9, 0.999), schedulable=True)
    num_data: int | None = setting(POSITIVE, default=None, optional=True)
    prior_precision: float = setting(POSITIVE, default=1.0, upper_limit=1e30, schedulable=True, open_until_fit=True)
    prior_mean: PriorMean = setting(choice(*get_args(PriorMean)), default="zero")
    prior: AbstractPosterior | None = setting(default=None, optional=True, in_group=False)
    prior_on_mean: bool = setting(default=True)  # whether another optimizer's step feels the prior; set by callbacks
    kl_weight: float = setting(POSITIVE, default=1.0, upper_limit=1e12, schedulable=True)
    kl_warmup_steps: int = setting(NOT_NEGATIVE, default=0)
    kl_warmup_init: float = setting(POSITIVE_FRACTION, default=0.1)
    data_augmentation_factor: float = setting(
        POSITIVE, default=1.0, upper_limit=1e12, schedulable=True, open_until_fit=True
    )
    damping: float = setting(NOT_NEGATIVE, default=0.0, upper_limit=1e12, schedulable=True)
    damping_in_noise: bool = setting(default=False)
    init_precision: float | None = setting(POSITIVE, default=None, upper_limit=1e30, optional=True)
    step_rule: StepRule = setting(choice(*get_args(StepRule)), default="natural")
    radius: RadiusRule = setting(choice(*get_args(RadiusRule)), default="adam")
    momentum: float = setting(MOMENTUM, default=0.0, schedulable=True)
    relative_noise: float | None = setting(POSITIVE, default=None, upper_limit=1e12, schedulable=True, optional=True)
    noise_flatness: float | None = setting(POSITIVE, default=None, upper_limit=1e12, optional=True)
    max_noise: float | None = setting(INVERTIBLE, default=None, upper_limit=1e12, schedulable=True, optional=True)
    weight_decay: float = setting(NOT_NEGATIVE, default=0.0, upper_limit=1e12, schedulable=True)
    curvature_interval: int = setting(POSITIVE_COUNT, default=1, open_until_fit=True)
    antithetic: bool | None = setting(default=None)
    step: int = setting(COUNT, default=0)  # number of updates so far
    mc_samples: int = setting(POSITIVE_COUNT, default=1, in_group=False)
    eval_samples: int = setting(COUNT, default=10, in_group=False)  # of callbacks
    val_samples: int | None = setting(COUNT, default=None, optional=True, in_group=False)  # of callbacks
    max_nonfinite_steps: int = setting(POSITIVE_COUNT, default=10, in_group=False)
    seed: int = setting(WHOLE, default=0, in_group=False)  # groups hold it as noise_seed
    bayesian: str | None = setting(default=None, in_group=False)
    engine: EngineName = setting(default="fused", in_group=False)
    loss_reduction: LossReduction = setting(default="auto", in_group=False)
    workspace_mib: float = setting(default=DEFAULT_MIB, in_group=False)

    @classmethod
    def of(cls: type[HyperparametersT], group: Mapping[str, Any]) -> HyperparametersT:
        """Read the record from a parameter group.

        Args:
            group: A parameter group; entries of others, such as of schedulers, are ignored.

        Returns:
            The record.
        """
        return cls(**{name: group[name] for name in cls.settings() if name in group})

    @classmethod
    def given(cls, values: Mapping[str, Any], own_defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Complete an optimizer's arguments by defaults, and check them.

        Args:
            values: Arguments by name; numbers or functions of the step.
            own_defaults: Defaults of the algorithm, where they differ from the record's.

        Returns:
            All of them by name.

        Raises:
            TypeError: If there is no argument of a name. Values out of their ranges are a `HyperparameterError`.
        """
        unknown = sorted(set(values) - set(cls.settings()))
        if unknown:
            raise TypeError(
                f"There is no argument {', '.join(unknown)}. These are: {', '.join(sorted(cls.settings()))}."
            )
        every = {**cls.defaults(), **own_defaults, **values}
        cls.check(every, complete=True)
        return every

    @classmethod
    def group_values(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `values` that parameter groups hold."""
        return {name: values[name] for name, setting in cls.settings().items() if setting.in_group and name in values}

    @classmethod
    def own_names(cls) -> tuple[str, ...]:
        """The hyperparameters of the algorithm alone that parameter groups hold."""
        shared = {f.name for f in fields(Hyperparameters)}
        return tuple(name for name, setting in cls.settings().items() if setting.in_group and name not in shared)

    def effective(self) -> Effective:
        """Compute Ñ, τ, δ̃ and γ; see `effective`."""
        return effective(vars(self))

    @classmethod
    def _too_large_together(cls, values: Mapping[str, Any]) -> Iterator[str]:
        known = {name: value for name, value in values.items() if value is not None}
        if not {"kl_weight", "prior_precision", "num_data"} <= set(known):
            return
        now = effective({**cls.defaults(), **known, "kl_warmup_steps": 0})
        if now.prior > _LARGEST_PRIOR:
            yield (
                f"kl_weight={now.kl_weight:g} times prior_precision={now.prior_precision:g} is {now.prior:.3g} for each of "
                f"num_data={known['num_data']!r} examples, which must be at most {_LARGEST_PRIOR:g}"
            )
