"""The schema of all hyperparameters: their defaults, ranges and upper limits, and which may be functions of the step.

`Hyperparameters` is a frozen dataclass. Each field is declared with `setting`, and validation is generated from these
declarations. An algorithm with additional hyperparameters subclasses it; `own_defaults` overrides defaults:

    class IVON(VariationalOptimizer):
        hyperparameters = IVONHyperparameters              # adds clip_radius and rescale_lr
        own_defaults = {"betas": (0.9, 0.99999)}

Parameter groups are plain dicts, so schedulers can write into them and checkpoints hold plain numbers.
`Hyperparameters.of(flat(group))` reads a group; `optim.effective` derives Ñ, τ, δ̃ and γ from it.

Constructors accept the shared arguments as a TypedDict, which type checkers, editors and jsonargparse understand:

    def __init__(self, model, params=None, *, clip_radius=math.inf, **fields: Unpack[OptimizerFields])

jsonargparse reads the help texts from the TypedDict's docstring. A constructor parameter must not have the name of a field.
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
DecayKind: TypeAlias = Literal["decoupled", "unknown", "prior", "replaced"]  # see `optim.steps.decay`
RadiusRule: TypeAlias = Literal["adam", "sgd"]
HyperparametersT = TypeVar("HyperparametersT", bound="Hyperparameters")

_MAX_PRIOR = 1e12  # δ̃


class HyperparameterFields(TypedDict, total=False):
    """Arguments shared by optimizers and callbacks; `Hyperparameters` declares their ranges.

    Attributes:
        betas: (β₁, β₂), decay rates of the momentum and of the curvature average, as in Adam. Default: (0.9, 0.999)
            unless the algorithm overrides it.
        num_data: N, number of training examples. Optimizers require it before the first update; callbacks infer it.
        prior_mean: Mean μ₀ of the prior: ``"zero"``, or ``"initial"`` for the initial weights, such as pretrained ones.
            Default: ``"zero"``.
        kl_weight: τ, weight of the KL term, above 0. Values below 1 give a cold posterior, values above 1 a warm one.
            Default: 1.
        kl_warmup_steps: Number of updates over which τ grows linearly to `kl_weight`; 0 disables the warm-up. Default: 0.
        kl_warmup_init: τ at the start of the warm-up, as a fraction of `kl_weight`. Default: 0.1.
        damping: γ, added to the curvature in the preconditioner. Default: 0.
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
        max_nonfinite_steps: Training stops with `NonFiniteError` after this many consecutive updates with a non-finite
            gradient or curvature; each of them is skipped. Default: 10.
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


class VariationalArguments(OptimizerFields, total=False):
    """Keyword arguments of `VariationalOptimizer`, for subclasses that add arguments.

    Attributes:
        base: The optimizer that updates the posterior mean.
    """

    base: Any


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(Record):
    """Hyperparameters of a noisy optimizer at one step, as numbers; `OptimizerFields` describes them."""

    lr: float = setting(NOT_NEGATIVE, default=1e-3, upper_limit=1e12, schedulable=True, open_until_fit=True)
    betas: tuple[float, float] = setting(BETAS, default=(0.9, 0.999), schedulable=True)
    num_data: int | None = setting(POSITIVE, default=None, optional=True)
    prior_precision: float = setting(POSITIVE, default=1.0, upper_limit=1e30, schedulable=True, open_until_fit=True)
    prior_mean: PriorMean = setting(choice(*get_args(PriorMean)), default="zero")
    prior: AbstractPosterior | None = setting(default=None, optional=True, in_group=False)
    prior_on_mean: bool = setting(default=True)  # whether the "user" step adds the prior's gradient
    decay: DecayKind = setting(choice(*get_args(DecayKind)), default="decoupled")
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
    step: int = setting(COUNT, default=0)  # updates so far
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
    def of(cls: type[HyperparametersT], values: Mapping[str, Any]) -> HyperparametersT:
        """Read the hyperparameters among `values`, such as those of a group (`optim.groups.flat`), and ignore others."""
        return cls(**{name: values[name] for name in cls.settings() if name in values})

    @classmethod
    def given(cls, values: Mapping[str, Any], own_defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Add the defaults to an optimizer's arguments, and check all of them with `check`."""
        unknown = sorted(set(values) - set(cls.settings()))
        if unknown:
            raise TypeError(
                f"There is no argument {', '.join(unknown)}. The arguments are: {', '.join(sorted(cls.settings()))}."
            )
        completed = {**cls.defaults(), **own_defaults, **values}
        cls.check(completed, complete=True)
        return completed

    @classmethod
    def group_values(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Select the values that parameter groups store."""
        return {name: values[name] for name, setting in cls.settings().items() if setting.in_group and name in values}

    @classmethod
    def own_names(cls) -> tuple[str, ...]:
        """Names of the group hyperparameters that the algorithm adds to `Hyperparameters`."""
        shared = {f.name for f in fields(Hyperparameters)}
        return tuple(name for name, setting in cls.settings().items() if setting.in_group and name not in shared)

    def effective(self) -> Effective:
        """Derive Ñ, τ, δ̃ and γ; see `optim.effective`."""
        return effective({"posterior": vars(self)})

    @classmethod
    def _too_large_together(cls, values: Mapping[str, Any]) -> Iterator[str]:
        numbers = {name: value for name, value in values.items() if value is not None}
        if not {"kl_weight", "prior_precision", "num_data"} <= set(numbers):
            return
        derived = effective({"posterior": {**cls.defaults(), **numbers, "kl_warmup_steps": 0}})
        if derived.prior > _MAX_PRIOR:
            yield (
                f"kl_weight={derived.kl_weight:g} times prior_precision={derived.prior_precision:g} is "
                f"{derived.prior:.3g} per example with num_data={numbers['num_data']!r}, but must be at most {_MAX_PRIOR:g}"
            )
