"""Hyperparameters of the mean-field family: one record of defaults, one table of ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning_bayes.errors import HyperparameterError


def _positive(value: float) -> bool:
    return 0 < value < math.inf


def _not_negative(value: float) -> bool:
    return 0 <= value < math.inf


def _fraction(value: float) -> bool:
    return 0 <= value <= 1


def _positive_count(value: float) -> bool:
    return isinstance(value, int) and value >= 1


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
    }
)
_MAY_BE_NONE = {"kl_clip", "lr", "std_lr", "prior_precision", "init_precision", "num_data", "relative_noise"}


def check(values: Mapping[str, Any]) -> None:
    """Require every known hyperparameter in `values` to lie in its range.

    Args:
        values: Hyperparameters by name; unknown names and functions of the step are ignored.

    Raises:
        HyperparameterError: Listing every one that does not.
    """
    fixed = {name: value for name, value in values.items() if not (callable(value) and name in SCHEDULABLE)}
    wrong = [
        f"{name}={fixed[name]!r} must be {wanted}"
        for name, (inside, wanted) in _RANGES.items()
        if name in fixed and not (fixed[name] is None and name in _MAY_BE_NONE) and not _holds(inside, fixed[name])
    ]
    if not wrong:
        wrong = list(_too_large(fixed))
    if "betas" in fixed and not _are_betas(fixed["betas"]):
        wrong.append(f"betas={fixed['betas']!r} must be two numbers of at least 0 and below 1")
    if values.get("prior_mean", "zero") not in {"zero", "initial"}:
        wrong.append(f"prior_mean={values['prior_mean']!r} must be 'zero' or 'initial'")
    if wrong:
        raise HyperparameterError("; ".join(wrong) + ".")


def _too_large(values: Mapping[str, Any]) -> Iterator[str]:
    """What is too large of values that are in their ranges."""
    for name, most in _MOST.items():
        value = values.get(name)
        if value is not None and value > most:
            yield f"{name}={value!r} must be at most {most:g}"
    needed: list[Any] = [values.get(name) for name in ("kl_weight", "prior_precision", "num_data")]
    if None not in needed:
        kl_weight, prior_precision, num_data = needed
        prior = kl_weight * prior_precision / (values.get("data_augmentation_factor", 1.0) * num_data)
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
