"""`Inputs`: how a training step calls ``forward``, so that every later pass calls it with the same entries of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from lightning_bayes.likelihood.paths import Path, leaf_at

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword


@final
@dataclass(frozen=True)
class Inputs:
    """How a training step calls ``forward``: the path in the batch of each argument, or the constant that it is.

    Attributes:
        args: Of the positional arguments: ``("path", path)`` or ``("value", constant)``.
        kwargs: Of the keyword arguments.
    """

    args: tuple[tuple[str, Any], ...] = ()
    kwargs: dict[str, tuple[str, Any]] = field(default_factory=dict)

    @staticmethod
    def found(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Iterable[tuple[Path, Any]]) -> Inputs | None:
        """The inputs of a call, by the entries of a batch; None if an argument is neither one of them nor a constant."""
        places = {id(value): path for path, value in reversed([*batch])}
        positional = [_argument(value, places) for value in args]
        named = {name: _argument(value, places) for name, value in kwargs.items()}
        if None in positional or None in named.values():
            return None
        return Inputs(tuple(each for each in positional if each), {name: each for name, each in named.items() if each})

    def of(self, batch: Any) -> Arguments:
        """The arguments of ``forward`` for a batch, without keyword arguments that it lacks; else a `LookupError`."""
        kwargs = {name: argument for name, argument in self.kwargs.items() if _is_in(batch, argument)}
        return (
            tuple(_value(argument, batch) for argument in self.args),
            {name: _value(argument, batch) for name, argument in kwargs.items()},
        )

    def paths(self) -> Iterator[Path]:
        """The paths of all arguments that are entries of the batch."""
        return (value for kind, value in (*self.args, *self.kwargs.values()) if kind == "path")

    def state(self) -> dict[str, Any]:
        """This value as plain data."""
        return {
            "args": [[kind, _plain(value)] for kind, value in self.args],
            "kwargs": {name: [kind, _plain(value)] for name, (kind, value) in self.kwargs.items()},
        }

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> Inputs:
        """The value of `state`."""
        return Inputs(
            tuple(_of_plain(*each) for each in state["args"]),
            {name: _of_plain(*each) for name, each in state["kwargs"].items()},
        )


def _argument(value: Any, places: Mapping[int, Path]) -> tuple[str, Any] | None:
    if id(value) in places:
        return "path", places[id(value)]
    return ("value", value) if value is None or isinstance(value, (bool, int, float, str)) else None


def _value(argument: tuple[str, Any], batch: Any) -> Any:
    kind, value = argument
    return leaf_at(batch, value) if kind == "path" else value


def _is_in(batch: Any, argument: tuple[str, Any]) -> bool:
    try:
        _value(argument, batch)
    except (LookupError, AttributeError, TypeError):
        return False
    return True


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _of_plain(kind: str, value: Any) -> tuple[str, Any]:
    return kind, tuple(value) if kind == "path" else value
