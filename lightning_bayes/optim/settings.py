"""Declarations of arguments: a typed dictionary states the type, the range, the default and the help of each, once.

    class MyArguments(TypedDict, total=False):
        radius: Annotated[float | Schedule, Setting(POSITIVE, 1.0, upper_limit=1e6, schedulable=True)]

Its docstring holds the help, such as ``radius: Bound of each component of the step. Default: 1.`` below ``Attributes:``.
Type checkers, editors and jsonargparse read it as a constructor's keyword arguments, ``**arguments: Unpack[MyArguments]``.
`Declaration` reads ranges and defaults, and checks values against them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from typing_extensions import get_type_hints

from lightning_bayes.errors import HyperparameterError


@dataclass(frozen=True)
class Range:
    """Allowed values of an argument."""

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
ANY: Final = Range("any", lambda value: True, (object,))


@dataclass(frozen=True, repr=False)
class Setting:
    """Properties of one argument."""

    range: Range = ANY
    default: Any = None
    upper_limit: float | None = None  # far above practical values: products of larger numbers would overflow float32
    schedulable: bool = False  # whether it may be a function of the step: a change leaves the optimizer's state valid
    optional: bool = False  # whether it may be None
    in_group: bool = True  # whether parameter groups store it
    chosen_later: bool = False  # whether it may be None until the fit; a function of the step may not return None
    takes_functions: bool = False  # whether it may be a function of something else than the step
    joint: bool = False  # whether optimizers with a joint posterior (`optim.dense`) take it, too, as a constant

    def __repr__(self) -> str:
        """The range in words, for the help of a command line."""
        return self.range.words

    def complaints(self, name: str, value: Any, *, is_function: bool) -> Iterator[str]:
        """Yield an error if a value is outside the range, or above the limit."""
        if value is None and (self.optional or (self.chosen_later and not is_function)):
            return
        if value not in self.range:
            hint = f". Pass {name}={value}, without quotes" if _is_quoted_number(value) else ""
            yield f"{name}={value!r} must be {self.range.words}{hint}"
        elif self.upper_limit is not None and value > self.upper_limit:
            yield f"{name}={value!r} must be at most {self.upper_limit:g}"


def _is_quoted_number(value: Any) -> bool:
    return isinstance(value, str) and value.replace(".", "", 1).isdecimal()


class Declaration:
    """The arguments that typed dictionaries declare, as `Setting` by name."""

    def __init__(self, *dictionaries: type) -> None:
        self._dictionaries = dictionaries
        hints: dict[str, Any] = {}
        for dictionary in dictionaries:
            hints |= get_type_hints(dictionary, include_extras=True)
        marked = {name: hint for name, hint in hints.items() if isinstance(_mark(hint), Setting)}
        self.settings: dict[str, Setting] = {name: _mark(hint) for name, hint in marked.items()}
        self.types = {name: hint.__origin__ for name, hint in marked.items()}
        self.defaults = {name: setting.default for name, setting in self.settings.items()}
        self.schedulable = frozenset(name for name, setting in self.settings.items() if setting.schedulable)

    def __reduce__(self) -> tuple[Any, ...]:
        return declaration_of, self._dictionaries

    def check(self, values: Mapping[str, Any]) -> None:
        """Raise `HyperparameterError` if values of declared arguments are out of range."""
        functions = {n for n, mark in self.settings.items() if callable(values.get(n)) and not mark.takes_functions}
        self.require_schedulable(functions)
        numbers = plain({name: values[name] for name in self.settings if name in values and name not in functions})
        numbers |= plain({name: values[name](0) for name in functions})
        found = (self.settings[n].complaints(n, value, is_function=n in functions) for n, value in numbers.items())
        if errors := [error for errors in found for error in errors]:
            raise HyperparameterError("; ".join(errors) + ".")

    def require_schedulable(self, names: Iterable[str]) -> None:
        """Raise `HyperparameterError` if any of the arguments `names` may not be a function of the step."""
        if wrong := sorted(set(names) - self.schedulable):
            raise HyperparameterError(
                f"{', '.join(wrong)} cannot be a function of the step. Only {', '.join(sorted(self.schedulable))} can."
            )

    def completed(self, values: Mapping[str, Any], own_defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Add the defaults, of which `own_defaults` override the declared ones, and check all values."""
        refuse_unknown(values, self.settings)
        completed = {**self.defaults, **own_defaults, **values}
        self.check(completed)
        return completed

    def group_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Select the values that parameter groups store."""
        return {name: values[name] for name, setting in self.settings.items() if setting.in_group and name in values}


def refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `TypeError` for arguments that are not known."""
    if unknown := sorted(set(names).difference(known)):
        raise TypeError(f"There is no argument {', '.join(unknown)}. The arguments are: {', '.join(sorted(known))}.")


def _mark(hint: Any) -> Any:
    return next(iter(getattr(hint, "__metadata__", ())), None)


@cache
def declaration_of(*dictionaries: type) -> Declaration:
    """The declaration of typed dictionaries, read once."""
    return Declaration(*dictionaries)


def joined_help(first: type, *others: type) -> str:
    """The docstring of a typed dictionary that inherits from others, which jsonargparse would not look up."""
    added = [(other.__doc__ or "").partition("Attributes:\n")[2].rstrip() for other in others]
    return "\n".join([(first.__doc__ or "").rstrip(), *added, "    "])


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with NumPy numbers and zero-dimensional tensors as Python numbers, for checkpoints; ``betas`` as a tuple."""
    converted = {name: _plain(value) for name, value in values.items()}
    if isinstance(converted.get("betas"), Iterable):
        converted["betas"] = tuple(_plain(beta) for beta in converted["betas"])
    return converted


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else value
