"""Declaring hyperparameters in a dataclass: each field says its range, its limit, and what else it may be.

    @dataclass(frozen=True, kw_only=True)
    class MyHyperparameters(Hyperparameters):
        radius: float = setting(POSITIVE, default=1.0, upper_limit=1e6, schedulable=True)

`Record.check` is generated from these declarations.
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
    """Allowed values.

    Attributes:
        words: The requirement in error messages: "must be …".
        contains: Whether a value of the types lies inside.
        types: The types of its values.
    """

    words: str
    contains: Callable[[Any], bool]
    types: tuple[type, ...] = (int, float)

    def __contains__(self, value: object) -> bool:
        """Whether `value` is of the types and lies inside."""
        return isinstance(value, self.types) and self.contains(value)


def choice(*names: str) -> Range:
    """One of several names."""
    return Range(" or ".join(map(repr, names)), lambda value: value in names, (str,))


POSITIVE = Range("above 0", lambda v: 0 < v < math.inf)
INVERTIBLE = Range("above 0, at least 1e-12", lambda v: 1e-12 <= v < math.inf)  # single precision holds 1/v²
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
    """The range of one hyperparameter.

    Attributes:
        range: Its range; None for any value.
        upper_limit: Far beyond any use. Products of larger numbers, such as squares of gradients, overflow single precision.
        schedulable: Whether it may be a function of the step: it may change without changing what the state means.
        optional: Whether it may be None.
        open_until_fit: Whether callbacks may leave it None until the fit.
        in_group: Whether parameter groups hold it.
    """

    range: Range | None = None
    upper_limit: float | None = None
    schedulable: bool = False
    optional: bool = False
    open_until_fit: bool = False
    in_group: bool = True


def setting(range_: Range | None = None, *, default: Any = MISSING, **words: Any) -> Any:
    """Declare a hyperparameter as a dataclass field.

    Args:
        range_: Its range.
        default: Its default.
        **words: Further attributes of `Setting`.

    Returns:
        The field.
    """
    return field(default=default, metadata={"setting": Setting(range_, **words)})


@dataclass(frozen=True, kw_only=True)
class Record(ABC):
    """Hyperparameters whose fields are declared by `setting`."""

    @classmethod
    @cache
    def settings(cls) -> Mapping[str, Setting]:
        """The range of each hyperparameter, by name."""
        return MappingProxyType({f.name: f.metadata["setting"] for f in fields(cls) if "setting" in f.metadata})

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The defaults by name."""
        return {f.name: f.default for f in fields(cls) if "setting" in f.metadata and f.default is not MISSING}

    @classmethod
    def schedulable(cls) -> frozenset[str]:
        """The names of those that may be functions of the step."""
        return frozenset(name for name, setting in cls.settings().items() if setting.schedulable)

    @classmethod
    def check(cls, values: Mapping[str, Any], *, complete: bool = False) -> None:
        """Require every known hyperparameter among `values` to lie in its range.

        Args:
            values: Hyperparameters by name, or functions of the step, of which the first value counts. Unknown names are
                ignored.
            complete: Whether those that callbacks may leave open must be set.

        Raises:
            HyperparameterError: Listing every one that does not, or naming functions that cannot be schedules.
        """
        functions = {name for name in cls.settings() if callable(values.get(name))}
        cls.require_schedulable(functions)
        found = plain({**values, **{name: values[name](0) for name in functions}})
        may_be_open = set(cls.settings()) - functions if not complete else set()
        wrong = list(cls._out_of_range(found, may_be_open)) or [*cls._too_large(found), *cls._too_large_together(found)]
        if wrong:
            raise HyperparameterError("; ".join(wrong) + ".")

    @classmethod
    def require_schedulable(cls, names: Iterable[str]) -> None:
        """Require hyperparameters that may be functions of the step.

        Args:
            names: The hyperparameters that are functions.

        Raises:
            HyperparameterError: Naming those that may not.
        """
        wrong = sorted(set(names) - cls.schedulable())
        if wrong:
            raise HyperparameterError(
                f"{', '.join(wrong)} cannot be a function of the step. These can: {', '.join(sorted(cls.schedulable()))}."
            )

    @classmethod
    def _out_of_range(cls, values: Mapping[str, Any], may_be_open: set[str]) -> Iterator[str]:
        for name, setting in cls.settings().items():
            if name not in values or setting.range is None:
                continue
            value = values[name]
            is_unset = value is None and (setting.optional or (setting.open_until_fit and name in may_be_open))
            if not is_unset and value not in setting.range:
                yield f"{name}={value!r} must be {setting.range.words}"

    @classmethod
    def _too_large(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """Errors of values that are in their ranges, but beyond their limits."""
        for name, setting in cls.settings().items():
            value = values.get(name)
            if value is not None and setting.upper_limit is not None and value > setting.upper_limit:
                yield f"{name}={value!r} must be at most {setting.upper_limit:g}"

    @classmethod
    @abstractmethod
    def _too_large_together(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """Errors of values that are within their limits, but not what they amount to."""


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn NumPy numbers and tensors without dimensions into Python numbers, which checkpoints can hold safely.

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
