"""Refuses arguments that a constructor does not know or that are of another kind, and names the one probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Constructor = TypeVar("_Constructor", bound=Callable[..., None])
_JUDGED: Final = (str, os.PathLike, Real, list, tuple, dict)  # values of other types are left to the constructor


def checked(init: _Constructor) -> _Constructor:
    """Decorator of an ``__init__`` with plain arguments; signature, help and annotations stay as they are."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        callback, names = type(self).__name__, [name for name in signature.parameters if name != "self"]
        require_known(callback, kwargs, names)
        try:
            bound = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{callback}: {error}. Its arguments are: {', '.join(names)}.") from None
        hints, unnamed = get_type_hints(init), names[: len(args)]
        for name in unnamed:
            _require_kind(callback, name, bound, {n: hints[n] for n in names if n not in bound or n == name})
        for name in kwargs:
            _require_kind(callback, name, bound, {name: hints[name]})
        init(self, *args, **kwargs)

    return constructor  # type: ignore[return-value]  # it has the signature of what it wraps


def require_known(callback: str, passed: Iterable[str], names: Iterable[str]) -> None:
    """Raise a `TypeError` for a keyword that is none of the names, with the nearest, or those that contain it as a word."""
    known = sorted(names)
    unknown = sorted(set(passed) - set(known))
    if unknown:
        close = [name for name in known if unknown[0] in name.split("_")] or difflib.get_close_matches(
            unknown[0], known, 1
        )
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise TypeError(
            f"{callback} has no argument {', '.join(unknown)}.{hint} Its arguments are: {', '.join(known)}."
        )


def _require_kind(callback: str, name: str, passed: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise a `TypeError` for a value of another kind than its argument's, with another of `hints` that takes it."""
    value, is_unnamed = passed[name], len(hints) > 1
    if not isinstance(value, _JUDGED) or _takes(hints[name], value, strict=is_unnamed):
        return
    meant = _meant(value, [(other, hint) for other, hint in hints.items() if other != name])
    if isinstance(value, str) and _has_names(hints[name]) and not (meant and _has_names(hints[meant])):
        return  # the constructor lists the names
    hint = f" Did you mean {meant}={value!r}?" if meant else ""
    if hint or not _takes(hints[name], value):
        raise TypeError(f"{callback} takes no {type(value).__name__} as {name}, got {value!r}.{hint}")


def _meant(value: Any, others: Sequence[tuple[str, Any]]) -> str | None:
    """The first argument of exactly this type, else the first that takes the value."""
    exact = [name for name, hint in others if type(value) in _parts(hint)]
    return next(iter(exact + [name for name, hint in others if _takes(hint, value, strict=True)]), None)


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union, otherwise the type itself."""
    return get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)


def _has_names(hint: Any) -> bool:
    return any(get_origin(part) is Literal for part in _parts(hint))


def _takes(hint: Any, value: Any, strict: bool = False) -> bool:
    """Whether a value is of a type; unless `strict`, any number counts as an int."""
    return any(_is_of(part, value, strict) for part in _parts(hint))


def _is_of(part: Any, value: Any, strict: bool) -> bool:
    origin = get_origin(part)
    if part is Any:
        return True
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(part))
    if part is int and strict:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if part in (int, float):
        return isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, origin or part)
