"""Hyperparameters of the mean-field family: one record of defaults, one table of ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from lightning_bayes.errors import HyperparameterError


class Effective(NamedTuple):
    """What a parameter group's hyperparameters amount to at its current step; see `effective`."""

    num_data: float  # Ñ = ρN
    kl_weight: float  # τ, warm-up included
    prior_precision: float  # δ
    prior: float  # δ̃ = τδ/Ñ
    damping: float  # γ
    noise_damping: float  # γ where it counts in the noise, else 0
    relative_noise: float | None  # κ

    @property
    def scale(self) -> float:
        """Ñ/τ, from curvature per example to posterior precision."""
        return self.num_data / self.kl_weight

    @property
    def precision_arguments(self) -> dict[str, float]:
        """The arguments of `posteriors.precision` and `posteriors.initial_curvature`."""
        return {
            "num_data": self.num_data,
            "prior_precision": self.prior_precision,
            "kl_weight": self.kl_weight,
            "damping": self.noise_damping,
        }


def effective(group: Mapping[str, Any]) -> Effective:
    """Compute Ñ, τ, δ̃ and γ of a parameter group at its current step; the only place where they are computed.

    τ grows linearly from ``kl_warmup_init``·τ to τ over ``kl_warmup_steps``.

    Args:
        group: A parameter group of a noisy optimizer, live or from a checkpoint.

    Returns:
        The effective values.

    Raises:
        HyperparameterError: If ``num_data`` is not set.

    Example:
        >>> group = {"num_data": 50, "data_augmentation_factor": 2.0, "prior_precision": 10.0, "kl_weight": 0.5,
        ...          "kl_warmup_steps": 0, "kl_warmup_init": 0.1, "damping": 0.1, "damping_in_noise": False, "step": 0}
        >>> effective(group).prior  # 0.5 · 10 / (2 · 50)
        0.05
    """
    if group["num_data"] is None:
        raise HyperparameterError("num_data is not set. Pass num_data=len(training_set).")
    num_data = group["num_data"] * group["data_augmentation_factor"]
    steps, start = group["kl_warmup_steps"], group["kl_warmup_init"]
    done = min(1.0, group["step"] / steps) if steps else 1.0
    kl_weight = float(group["kl_weight"] * (start + (1 - start) * done))
    prior_precision = group["prior_precision"]
    return Effective(
        num_data=num_data,
        kl_weight=kl_weight,
        prior_precision=prior_precision,
        prior=prior_precision * kl_weight / num_data,
        damping=group["damping"],
        noise_damping=group["damping"] if group["damping_in_noise"] else 0.0,
        relative_noise=group.get("relative_noise"),
    )


PriorMean: TypeAlias = Literal["zero", "initial"]
StepRule: TypeAlias = Literal["natural", "trust_region", "user"]
RadiusRule: TypeAlias = Literal["adam", "sgd"]


def _positive(value: float) -> bool:
    return 0 < value < math.inf


def _not_negative(value: float) -> bool:
    return 0 <= value < math.inf


def _fraction(value: float) -> bool:
    return 0 <= value <= 1


def _positive_count(value: float) -> bool:
    return isinstance(value, int) and value >= 1


def _whole(value: float) -> bool:
    return isinstance(value, int)


def _count(value: float) -> bool:
    return isinstance(value, int) and value >= 0


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_not_negative, "at least 0"),
    "std_lr": (_not_negative, "at least 0"),
    "prior_precision": (_positive, "above 0"),
    "kl_weight": (_positive, "above 0"),
    "kl_warmup_steps": (_not_negative, "at least 0"),
    "kl_warmup_init": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "data_augmentation_factor": (_positive, "above 0"),
    "damping": (_not_negative, "at least 0"),
    "init_precision": (_positive, "above 0"),
    "num_data": (_positive, "above 0"),
    "relative_noise": (_positive, "above 0"),
    "weight_decay": (_not_negative, "at least 0"),
    "kl_clip": (_positive, "above 0"),
    "max_side": (_positive_count, "a whole number of at least 1"),
    "momentum": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "mc_samples": (_positive_count, "a whole number of at least 1"),
    "eval_samples": (_count, "a whole number of at least 0"),
    "max_nonfinite_steps": (_positive_count, "a whole number of at least 1"),
    "clip_radius": (lambda v: v > 0, "above 0"),  # infinite for none
    "temperature": (_fraction, "at least 0 and at most 1"),
    "seed": (_whole, "a whole number"),
    "noise_seed": (_whole, "a whole number"),
}
# Far beyond any use; what is made of larger numbers, such as squares of gradients, overflows single precision at 3e38.
_MOST: dict[str, float] = {
    "lr": 1e12,
    "std_lr": 1e12,
    "prior_precision": 1e30,
    "kl_weight": 1e12,
    "data_augmentation_factor": 1e12,
    "damping": 1e12,
    "init_precision": 1e30,
    "relative_noise": 1e12,
    "weight_decay": 1e12,
    "kl_clip": 1e12,
}
_MOST_PRIOR = 1e12  # δ̃
_CHOICES = {"prior_mean": get_args(PriorMean), "step_rule": get_args(StepRule), "radius": get_args(RadiusRule)}
# What may change from update to update without changing what the state means.
SCHEDULABLE = frozenset(
    {
        "lr",
        "std_lr",
        "betas",
        "prior_precision",
        "kl_weight",
        "data_augmentation_factor",
        "damping",
        "kl_clip",
        "relative_noise",
        "weight_decay",
        "momentum",
        "temperature",
        "clip_radius",
    }
)
_MAY_BE_NONE = frozenset({"kl_clip", "std_lr", "init_precision", "num_data", "relative_noise"})
_LEFT_OPEN = frozenset({"lr", "prior_precision", "data_augmentation_factor"})  # by callbacks, until the fit


def check(values: Mapping[str, Any], *, complete: bool = False) -> None:
    """Require every known hyperparameter in `values` to lie in its range.

    Args:
        values: Hyperparameters by name, or functions of the step, of which the first value counts. Unknown names are
            ignored.
        complete: Whether there has to be a number where callbacks may leave None.

    Raises:
        HyperparameterError: Listing every one that does not, or naming functions that cannot be schedules.
    """
    functions = {name for name in (*_RANGES, "betas") if callable(values.get(name))}
    require_schedulable(functions)
    found = plain({**values, **{name: values[name](0) for name in functions}})
    optional = _MAY_BE_NONE if complete else _MAY_BE_NONE | (_LEFT_OPEN - functions)
    wrong = list(_out_of_range(found, optional)) or list(_too_large(found))
    if "betas" in found and not _are_betas(found["betas"]):
        wrong.append(f"betas={found['betas']!r} must be two numbers of at least 0 and below 1")
    for name, choices in _CHOICES.items():
        if name in found and found[name] not in choices:
            wrong.append(f"{name}={found[name]!r} must be {' or '.join(map(repr, choices))}")
    if wrong:
        raise HyperparameterError("; ".join(wrong) + ".")


def check_base(step_rule: str, base: object) -> None:
    """Require an optimizer that moves the means for the step rule ``"user"``, and for no other.

    Args:
        step_rule: The rule.
        base: The optimizer, or None.

    Raises:
        HyperparameterError: If they do not fit.
    """
    if (step_rule == "user") != (base is not None):
        raise HyperparameterError(
            f"step_rule={step_rule!r} and base={base and type(base).__name__} do not fit: the rule 'user', and no other, "
            "lets another optimizer move the means. Pass that one as base=..., or leave both out."
        )


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn numbers of NumPy and tensors of no dimension into Python's own, which checkpoints can hold safely.

    Args:
        values: Hyperparameters by name.

    Returns:
        The same; ``betas`` is a tuple.

    Example:
        >>> import torch
        >>> plain({"lr": torch.tensor(0.5), "betas": [0, 0.5], "bayesian": None})
        {'lr': 0.5, 'betas': (0, 0.5), 'bayesian': None}
    """
    found = {name: _plain(value) for name, value in values.items()}
    if isinstance(found.get("betas"), Iterable):
        found["betas"] = tuple(_plain(beta) for beta in found["betas"])
    return found


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else value


def require_schedulable(names: Iterable[str], own: Iterable[str] = ()) -> None:
    """Require hyperparameters that may be functions of the step.

    Args:
        names: What is a function.
        own: Further names that may be functions.

    Raises:
        HyperparameterError: Naming those that may not.
    """
    allowed = {*SCHEDULABLE, *own}
    wrong = sorted(set(names) - allowed)
    if wrong:
        raise HyperparameterError(
            f"{', '.join(wrong)} cannot be a function of the step. These can: {', '.join(sorted(allowed))}."
        )


def _out_of_range(values: Mapping[str, Any], optional: frozenset[str]) -> Iterator[str]:
    for name, (inside, wanted) in _RANGES.items():
        if name in values and not (values[name] is None and name in optional) and not _holds(inside, values[name]):
            yield f"{name}={values[name]!r} must be {wanted}"


def _too_large(values: Mapping[str, Any]) -> Iterator[str]:
    """What is too large of values that are in their ranges."""
    for name, most in _MOST.items():
        value = values.get(name)
        if value is not None and value > most:
            yield f"{name}={value!r} must be at most {most:g}"
    needed: list[Any] = [values.get(name) for name in ("kl_weight", "prior_precision", "num_data")]
    if None not in needed:
        kl_weight, prior_precision, num_data = needed
        prior = kl_weight * prior_precision / ((values.get("data_augmentation_factor") or 1.0) * num_data)
        if prior > _MOST_PRIOR:
            yield (
                f"kl_weight={kl_weight:g} times prior_precision={prior_precision:g} is {prior:.3g} for each of "
                f"num_data={num_data!r} examples, which must be at most {_MOST_PRIOR:g}"
            )


def _holds(inside: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, (int, float)) and inside(value)


def _are_betas(betas: Any) -> bool:
    return (
        isinstance(betas, Sequence)
        and len(betas) == 2
        and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in betas)
    )
