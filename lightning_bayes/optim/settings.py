"""Declarations of hyperparameters: dataclass fields with a range, an upper limit and further properties.

    @dataclass(frozen=True, kw_only=True)
    class MyHyperparameters(Hyperparameters):
        radius: float = setting(POSITIVE, default=1.0, upper_limit=1e6, schedulable=True)

`Record.check` validates values against these declarations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from lightning_bayes.errors import HyperparameterError


@dataclass(frozen=True)
class Range:
    """Allowed values of a hyperparameter."""

    words: str
    contains: Callable[[Any], bool]
    types: tuple[type, ...] = (int, float)

    def __contains__(self, value: object) -> bool:
        """Return whether `value` has an allowed type and is in the range."""
        return isinstance(value, self.types) and self.contains(value)


def choice(*names: str) -> Range:
    """Return the range of values that are one of `names`."""
    return Range(" or ".join(map(repr, names)), lambda value: value in names, (str,))


POSITIVE = Range("above 0", lambda v: 0 < v < math.inf)
INVERTIBLE = Range("above 0, at least 1e-12", lambda v: 1e-12 <= v < math.inf)  # 1/v² must not overflow float32
POSITIVE_OR_INFINITE = Range("above 0", lambda v: v > 0)
NOT_NEGATIVE = Range("at least 0", lambda v: 0 <= v < math.inf)
FRACTION = Range("at least 0 and at most 1", lambda v: 0 <= v <= 1)
POSITIVE_FRACTION = Range("above 0 and at most 1", lambda v: 0 < v <= 1)
MOMENTUM = Range("at least 0 and below 1", lambda v: 0 <= v < 1)
WHOLE = Range("a whole number", lambda v: isinstance(v, int))
COUNT = Range("a whole number of at least 0", lambda v: isinstance(v, int) and v >= 0)
POSITIVE_COUNT = Range("a whole number of at least 1", lambda v: isinstance(v, int) and v >= 1)
BETAS = Range(
    "two numbers of at least 0 and below 1", lambda v: len(v) == 2 and all(beta in MOMENTUM for beta in v), (Sequence,)
)


@dataclass(frozen=True)
class Setting:
    """Properties of one hyperparameter.

    Attributes:
        range: Allowed values; None allows any value.
        upper_limit: Limit far above practical values. Products of larger numbers would overflow float32.
        schedulable: Whether it may be a function of the step. Requires that changing it leaves the optimizer's state valid.
        optional: Whether it may be None.
        open_until_fit: Whether a callback may leave it None until the fit starts.
        in_group: Whether parameter groups store it.
    """

    range: Range | None = None
    upper_limit: float | None = None
    schedulable: bool = False
    optional: bool = False
    open_until_fit: bool = False
    in_group: bool = True


def setting(range_: Range | None = None, *, default: Any = MISSING, **properties: Any) -> Any:
    """Declare a hyperparameter as a dataclass field; `properties` are attributes of `Setting`."""
    return field(default=default, metadata={"setting": Setting(range_, **properties)})


@dataclass(frozen=True, kw_only=True)
class Record(ABC):
    """Base of dataclasses whose fields are declared with `setting`."""

    @classmethod
    @cache
    def settings(cls) -> Mapping[str, Setting]:
        """The declaration of each hyperparameter by name."""
        return MappingProxyType({f.name: f.metadata["setting"] for f in fields(cls) if "setting" in f.metadata})

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The defaults by name."""
        return {f.name: f.default for f in fields(cls) if "setting" in f.metadata and f.default is not MISSING}

    @classmethod
    def schedulable(cls) -> frozenset[str]:
        """Names of the hyperparameters that may be functions of the step."""
        return frozenset(name for name, setting in cls.settings().items() if setting.schedulable)

    @classmethod
    def check(cls, values: Mapping[str, Any], *, complete: bool = False) -> None:
        """Check hyperparameters against their ranges and limits."""
        functions = {name for name in cls.settings() if callable(values.get(name))}
        cls.require_schedulable(functions)
        numbers = plain({**values, **{name: values[name](0) for name in functions}})
        may_be_open = set() if complete else set(cls.settings()) - functions
        errors = list(cls._out_of_range(numbers, may_be_open))
        if not errors:
            errors = [*cls._too_large(numbers), *cls._too_large_together(numbers)]
        if errors:
            raise HyperparameterError("; ".join(errors) + ".")

    @classmethod
    def require_schedulable(cls, names: Iterable[str]) -> None:
        """Raise `HyperparameterError` if any of the hyperparameters `names` may not be a function of the step."""
        wrong = sorted(set(names) - cls.schedulable())
        if wrong:
            raise HyperparameterError(
                f"{', '.join(wrong)} cannot be a function of the step. Only {', '.join(sorted(cls.schedulable()))} can."
            )

    @classmethod
    def _out_of_range(cls, values: Mapping[str, Any], may_be_open: set[str]) -> Iterator[str]:
        """Yield an error for each value outside its range."""
        for name, setting in cls.settings().items():
            if name not in values or setting.range is None:
                continue
            value = values[name]
            is_unset = value is None and (setting.optional or (setting.open_until_fit and name in may_be_open))
            if not is_unset and value not in setting.range:
                yield f"{name}={value!r} must be {setting.range.words}"

    @classmethod
    def _too_large(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield an error for each value above its upper limit."""
        for name, setting in cls.settings().items():
            value = values.get(name)
            if value is not None and setting.upper_limit is not None and value > setting.upper_limit:
                yield f"{name}={value!r} must be at most {setting.upper_limit:g}"

    @classmethod
    @abstractmethod
    def _too_large_together(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield an error for each combination of values that is too large although every value is within its limit."""


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert NumPy numbers and zero-dimensional tensors to Python numbers, which checkpoints can store safely.

    Args:
        values: Hyperparameters by name.

    Returns:
        The converted values; ``betas`` is a tuple.

    Example:
        >>> import torch
        >>> plain({"lr": torch.tensor(0.5), "betas": [0, 0.5], "bayesian": None})
        {'lr': 0.5, 'betas': (0, 0.5), 'bayesian': None}
    """
    converted = {name: _plain(value) for name, value in values.items()}
    if isinstance(converted.get("betas"), Iterable):
        converted["betas"] = tuple(_plain(beta) for beta in converted["betas"])
    return converted


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else value
